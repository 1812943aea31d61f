// lora_delta for few tokens, on the vector cores: bound by reading A and B, so each is read once, by all cores at the
// same time. Cores that shrink own a slice of K each, cores that expand a slice of N each. The tokens x rank numbers
// x A^T between them are summed up in two steps:
//
//   shrinking core   partial sums -> GM       | SyncAll | a share of the sums, times scale -> GM | SyncAll |
//   expanding core   first tiles of B and y0  |         |                                        | sums <- GM, y -> GM
//
// The order of additions depends on the plan alone. Tokens that do not fit on chip take another pass. Many tokens, or
// very little work: a core does both for its tokens.
#pragma once

#include "ascendc_common/exchange.h"
#include "ascendc_common/row_products.h"
#include "kernel_operator.h"
#include "lora_delta_tiling.h"

namespace mindlora {

template <class T>
class LoraDeltaDecode {
public:
    __aicore__ inline LoraDeltaDecode(AscendC::TPipe& pipe, const LoraDeltaTiling& sizes)
        : sizes_(sizes), tiles_(sizes.decode), lowPitch_(PitchOf<float>(sizes.rank))
    {
        const uint32_t low = tiles_.tokensAtOnce * lowPitch_;
        const uint32_t shrinkRows = tiles_.products.rows;
        products_.Init(pipe, tiles_.products, shrinkRows > tiles_.expandRows ? shrinkRows : tiles_.expandRows);
        pipe.InitBuffer(yOut_, 2, tiles_.products.vectorElements * sizeof(T));
        pipe.InitBuffer(lowOut_, 1, low * sizeof(float));
        // All sums; or a share of them, each rounded up to a data block, of every shrinking core.
        pipe.InitBuffer(lowIn_, 1, (low + (tiles_.shrinkCores + 1) * 8) * sizeof(float));
    }

    __aicore__ inline void Bind(GM_ADDR y0, GM_ADDR x, GM_ADDR a, GM_ADDR b, GM_ADDR scale, GM_ADDR y, GM_ADDR exchange)
    {
        y0_ = {Global<T>(y0), sizes_.outFeatures};
        x_ = {Global<T>(x), sizes_.inFeatures};
        a_ = {Global<T>(a), sizes_.inFeatures};
        b_ = {Global<T>(b), sizes_.rank};
        y_ = {Global<T>(y), sizes_.outFeatures};
        scale_ = Global<float>(scale);
        exchange_ = Global<float>(exchange);
    }

    __aicore__ inline void Run()
    {
        const auto core = static_cast<uint32_t>(AscendC::GetBlockIdx());
        if (tiles_.shrinkCores == 0) {
            DoOwnTokens(Share(sizes_.tokens, 1, static_cast<uint32_t>(AscendC::GetBlockNum()), core));
            return;
        }
        for (firstToken_ = 0; firstToken_ < sizes_.tokens; firstToken_ += tokens_) {
            tokens_ = Least(tiles_.tokensAtOnce, sizes_.tokens - firstToken_);
            if (core < tiles_.shrinkCores) {
                DoShrink(core);
            } else {
                DoExpand(Share(sizes_.outFeatures, kUnit, tiles_.expandCores, core - tiles_.shrinkCores));
            }
        }
    }

private:
    static constexpr uint32_t kUnit = 16;  // columns and rows are dealt out in whole data blocks of any type

    __aicore__ inline void DoOwnTokens(const Range& mine)
    {
        const Range rows{0, sizes_.outFeatures};
        for (firstToken_ = mine.begin; firstToken_ < mine.end; firstToken_ += tokens_) {
            tokens_ = Least(tiles_.tokensAtOnce, mine.end - firstToken_);
            AscendC::LocalTensor<float> low = lowOut_.template AllocTensor<float>();
            Shrink(low, {0, sizes_.inFeatures});
            AscendC::Muls(low, low, scale_.GetValue(0), static_cast<int32_t>(tokens_ * lowPitch_));
            SendForExpand(RowsOfB(rows, rows.begin));
            Expand(low, rows);
            lowOut_.FreeTensor(low);
        }
    }

    // In GM: the sums, then the partial sums of one shrinking core after the other. The next pass writes partial sums
    // behind the second SyncAll, when all of this one's were read, and sums behind a first SyncAll, when these were.
    __aicore__ inline void DoShrink(uint32_t core)
    {
        const uint32_t cores = tiles_.shrinkCores;
        const uint32_t sums = tokens_ * sizes_.rank;
        const uint32_t sumsPitch = PitchOf<float>(tiles_.tokensAtOnce * sizes_.rank);
        AscendC::LocalTensor<float> low = lowOut_.template AllocTensor<float>();
        Shrink(low, Share(sizes_.inFeatures, kUnit, cores, core));
        Publish(exchange_[(core + 1) * sumsPitch], low, tokens_, sizes_.rank);
        AscendC::SyncAll();
        const Range mine = Share(sums, 8, cores, core);
        if (mine.Size() > 0) {
            AscendC::LocalTensor<float> parts = Fetch(exchange_[sumsPitch + mine.begin], cores, mine.Size(), sumsPitch);
            AddRowsUp(parts, cores, PitchOf<float>(mine.Size()));
            low = lowOut_.template AllocTensor<float>();
            AscendC::Muls(low, parts, scale_.GetValue(0), static_cast<int32_t>(mine.Size()));
            lowIn_.FreeTensor(parts);
            Publish(exchange_[mine.begin], low, 1, mine.Size());
        }
        AscendC::SyncAll();
    }

    __aicore__ inline void DoExpand(const Range& mine)
    {
        SendForExpand(RowsOfB(mine, mine.begin));
        AscendC::SyncAll();
        AscendC::SyncAll();
        AscendC::LocalTensor<float> low = Fetch(exchange_, tokens_, sizes_.rank, sizes_.rank);
        Expand(low, mine);
        lowIn_.FreeTensor(low);
    }

    __aicore__ inline void Shrink(const AscendC::LocalTensor<float>& low, const Range& columns)
    {
        products_.Multiply(low, lowPitch_, x_, firstToken_, tokens_, a_, {0, sizes_.rank}, columns);
    }

    // y[t, n] = y0[t, n] + low[t, :] B[n, :]^T for n in `rows`, the first tile of which was sent.
    __aicore__ inline void Expand(const AscendC::LocalTensor<float>& low, const Range& rows)
    {
        Range tile = RowsOfB(rows, rows.begin);
        while (tile.Size() > 0) {
            const Range next = RowsOfB(rows, tile.end);
            const uint32_t pitch = PitchOf<T>(tile.Size());
            SendForExpand(next);
            AscendC::LocalTensor<T> y0 = products_.TakeVectors();
            const AscendC::LocalTensor<float> sums = products_.WidenVectors(y0, tokens_ * pitch);
            products_.AddTile(sums, pitch, low, lowPitch_, tokens_, tile.Size(), sizes_.rank);
            AscendC::LocalTensor<T> y = yOut_.template AllocTensor<T>();
            Narrow(y, sums, tokens_ * pitch);
            products_.FreeVectors(y0);
            yOut_.EnQue(y);
            y = yOut_.template DeQue<T>();
            CopyRowsOut(y_.At(firstToken_, tile.begin), y, tokens_, tile.Size(), y_.columns);
            yOut_.FreeTensor(y);
            tile = next;
        }
    }

    __aicore__ inline void SendForExpand(const Range& rows)
    {
        products_.SendMatrix(b_, rows, {0, sizes_.rank});
        products_.SendVectors(y0_, firstToken_, tokens_, rows);
    }

    __aicore__ inline Range RowsOfB(const Range& mine, uint32_t begin) const
    {
        return TileOf(mine, begin, tiles_.expandRows);
    }

    // Hands on a tensor of lowOut_ and frees it.
    __aicore__ inline void Publish(
        const AscendC::GlobalTensor<float>& to, AscendC::LocalTensor<float>& low, uint32_t rows, uint32_t columns)
    {
        lowOut_.EnQue(low);
        low = lowOut_.template DeQue<float>();
        CopyRowsOut(to, low, rows, columns, columns);
        lowOut_.FreeTensor(low);
    }

    // A tensor of lowIn_, to be freed.
    __aicore__ inline AscendC::LocalTensor<float> Fetch(
        const AscendC::GlobalTensor<float>& from, uint32_t rows, uint32_t columns, uint32_t stride)
    {
        AscendC::LocalTensor<float> in = lowIn_.template AllocTensor<float>();
        CopyRowsIn(in, from, rows, columns, stride);
        lowIn_.EnQue(in);
        return lowIn_.template DeQue<float>();
    }

    const LoraDeltaTiling sizes_;
    const LoraDeltaDecodeTiling tiles_;
    const uint32_t lowPitch_;
    uint32_t firstToken_ = 0;  // the tokens at hand
    uint32_t tokens_ = 0;
    Matrix<T> y0_, x_, a_, b_, y_;
    AscendC::GlobalTensor<float> scale_, exchange_;
    RowProducts<T> products_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> lowIn_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> yOut_, lowOut_;
};

}  // namespace mindlora
