// lora_linear for few tokens, on the vector cores: bound by reading W, which every core reads a slice of, once. The
// rows of A and W are dealt out as if they were one matrix, so the first cores have A and fewer rows of W:
//
//   its rows of A, if any: x A^T, times scale -> GM | its rows of W: x W^T | SyncAll | x A^T <- GM, B, y -> GM
//
// The wait for x A^T is hidden behind W, no core adds to the sums of another, and the delta costs no pass over y. More
// tokens than fit on chip take several passes over the weights.
#pragma once

#include "ascendc_common/row_products.h"
#include "kernel_operator.h"
#include "lora_linear_tiling.h"

namespace mindlora {

template <class T>
class LoraLinearDecode {
public:
    __aicore__ inline LoraLinearDecode(AscendC::TPipe& pipe, const LoraLinearTiling& sizes)
        : sizes_(sizes), split_(sizes.vector), lowPitch_(PitchOf<float>(sizes.rank))
    {
        const uint32_t low = split_.tokensAtOnce * lowPitch_ * sizeof(float);
        const uint32_t results = split_.tokensAtOnce * split_.rowsAtOnce;
        const uint32_t rows = split_.products.rows;
        AscendC::TBuf<> sums;
        products_.Init(pipe, split_.products, rows > split_.expandRows ? rows : split_.expandRows);
        pipe.InitBuffer(sums, results * sizeof(float));
        pipe.InitBuffer(yOut_, 1, results * sizeof(T));
        pipe.InitBuffer(lowOut_, 1, low);
        pipe.InitBuffer(lowIn_, 1, low);
        sums_ = sums.Get<float>();
    }

    __aicore__ inline void Bind(
        GM_ADDR x, GM_ADDR w, GM_ADDR a, GM_ADDR b, GM_ADDR scale, GM_ADDR bias, GM_ADDR y, GM_ADDR exchange)
    {
        x_ = {Global<T>(x), sizes_.inFeatures};
        w_ = {Global<T>(w), sizes_.inFeatures};
        a_ = {Global<T>(a), sizes_.inFeatures};
        b_ = {Global<T>(b), sizes_.rank};
        bias_ = {Global<T>(bias), sizes_.outFeatures};
        y_ = {Global<T>(y), sizes_.outFeatures};
        scale_ = Global<float>(scale);
        low_ = {Global<float>(exchange), sizes_.rank};
    }

    __aicore__ inline void Run()
    {
        const auto core = static_cast<uint32_t>(AscendC::GetBlockIdx());
        const auto cores = static_cast<uint32_t>(AscendC::GetBlockNum());
        const uint32_t rank = sizes_.rank;
        const Range dealt = Share(rank + sizes_.outFeatures, 1, cores, core);
        const Range ranks{Least(dealt.begin, rank), Least(dealt.end, rank)};
        const Range rows{dealt.begin < rank ? 0 : dealt.begin - rank, dealt.end < rank ? 0 : dealt.end - rank};
        for (firstToken_ = 0; firstToken_ < sizes_.tokens; firstToken_ += tokens_) {
            tokens_ = Least(split_.tokensAtOnce, sizes_.tokens - firstToken_);
            const Range tile = TileOf(rows, rows.begin, split_.rowsAtOnce);
            if (cores == 1) {
                AscendC::LocalTensor<float> low = Shrink(ranks);
                MultiplyByW(tile);
                Finish(rows, tile, low);
                lowOut_.FreeTensor(low);
            } else {
                if (ranks.Size() > 0) {
                    Publish(Shrink(ranks), ranks);
                }
                MultiplyByW(tile);
                AscendC::SyncAll();
                AscendC::LocalTensor<float> low = FetchLow();
                Finish(rows, tile, low);
                lowIn_.FreeTensor(low);
            }
        }
    }

private:
    // (x A^T) * scale for some rows of A, as a tensor of lowOut_.
    __aicore__ inline AscendC::LocalTensor<float> Shrink(const Range& ranks)
    {
        const uint32_t pitch = PitchOf<float>(ranks.Size());
        AscendC::LocalTensor<float> low = lowOut_.template AllocTensor<float>();
        products_.Multiply(low, pitch, x_, firstToken_, tokens_, a_, ranks, {0, sizes_.inFeatures});
        AscendC::Muls(low, low, scale_.GetValue(0), static_cast<int32_t>(tokens_ * pitch));
        return low;
    }

    __aicore__ inline void Publish(AscendC::LocalTensor<float> low, const Range& ranks)
    {
        lowOut_.EnQue(low);
        low = lowOut_.template DeQue<float>();
        CopyRowsOut(low_.At(firstToken_, ranks.begin), low, tokens_, ranks.Size(), sizes_.rank);
        lowOut_.FreeTensor(low);
    }

    // All of (x A^T) * scale, as a tensor of lowIn_.
    __aicore__ inline AscendC::LocalTensor<float> FetchLow()
    {
        AscendC::LocalTensor<float> low = lowIn_.template AllocTensor<float>();
        CopyRowsIn(low, low_.At(firstToken_, 0), tokens_, sizes_.rank, sizes_.rank);
        lowIn_.EnQue(low);
        return lowIn_.template DeQue<float>();
    }

    // x W^T of the tile's rows into sums_; requests what Finish needs of them.
    __aicore__ inline void MultiplyByW(const Range& tile)
    {
        products_.Multiply(sums_, PitchOf<T>(tile.Size()), x_, firstToken_, tokens_, w_, tile, {0, sizes_.inFeatures});
        SendB(TileOf(tile, tile.begin, split_.expandRows));
        if (sizes_.hasBias != 0) {
            products_.SendVectors(bias_, 0, 1, tile);
        }
    }

    // y of the tile, whose product with W is done, and of all rows after it.
    __aicore__ inline void Finish(const Range& rows, Range tile, const AscendC::LocalTensor<float>& low)
    {
        while (tile.Size() > 0) {
            AddDelta(tile, low);
            if (sizes_.hasBias != 0) {
                AddBias(tile);
            }
            Store(tile);
            tile = TileOf(rows, tile.end, split_.rowsAtOnce);
            MultiplyByW(tile);
        }
    }

    __aicore__ inline void AddDelta(const Range& tile, const AscendC::LocalTensor<float>& low)
    {
        Range part = TileOf(tile, tile.begin, split_.expandRows);
        while (part.Size() > 0) {
            const Range next = TileOf(tile, part.end, split_.expandRows);
            SendB(next);
            products_.AddTile(sums_[part.begin - tile.begin], PitchOf<T>(tile.Size()), low, lowPitch_, tokens_,
                part.Size(), sizes_.rank);
            part = next;
        }
    }

    __aicore__ inline void AddBias(const Range& tile)
    {
        const uint32_t pitch = PitchOf<T>(tile.Size());
        AscendC::LocalTensor<T> raw = products_.TakeVectors();
        const AscendC::LocalTensor<float> bias = products_.WidenVectors(raw, pitch);
        for (uint32_t t = 0; t < tokens_; ++t) {
            AscendC::Add(sums_[t * pitch], sums_[t * pitch], bias, static_cast<int32_t>(tile.Size()));
        }
        products_.FreeVectors(raw);
    }

    __aicore__ inline void Store(const Range& tile)
    {
        AscendC::LocalTensor<T> y = yOut_.template AllocTensor<T>();
        Narrow(y, sums_, tokens_ * PitchOf<T>(tile.Size()));
        yOut_.EnQue(y);
        y = yOut_.template DeQue<T>();
        CopyRowsOut(y_.At(firstToken_, tile.begin), y, tokens_, tile.Size(), sizes_.outFeatures);
        yOut_.FreeTensor(y);
    }

    __aicore__ inline void SendB(const Range& rows) { products_.SendMatrix(b_, rows, {0, sizes_.rank}); }

    const LoraLinearTiling sizes_;
    const LoraLinearVectorTiling split_;
    const uint32_t lowPitch_;
    uint32_t firstToken_ = 0;  // the tokens at hand
    uint32_t tokens_ = 0;
    Matrix<T> x_, w_, a_, b_, bias_, y_;
    Matrix<float> low_;
    AscendC::GlobalTensor<float> scale_;
    AscendC::LocalTensor<float> sums_;
    RowProducts<T> products_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> lowIn_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> yOut_, lowOut_;
};

}  // namespace mindlora
