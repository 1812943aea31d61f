// lora_linear for 2 to 16 tokens, one row of fractals, on the cube cores: bound by reading W, which every core reads a
// slice of, once.
//
//   cube cores:   x A^T, a slice of K -> GM | x W^T, a slice of N, into L0C    | low <- GM, low B^T to the same sum, y
//   vector cores:                           | the slices' sum, times scale -> GM |
//
// No core waits for low until it has requested W: the exchange is hidden behind it.
#pragma once

#include "ascendc_common/tile_rows.h"
#include "lora_linear_vector.h"

namespace mindlora {

template <typename T>
class LoraLinearCube {
public:
    __aicore__ inline LoraLinearCube(
        AscendC::TPipe& pipe, const LoraLinearTiling& sizes, const PrefillExchange<T>& exchange)
        : sizes_(sizes), split_(sizes.cube), exchange_(exchange)
    {
        pipe.InitBuffer(leftIn_, kLeftStages, kFractalSide * split_.step * sizeof(T));
        pipe.InitBuffer(weightsIn_, kWeightStages, split_.tileElements * sizeof(T));
        pipe.InitBuffer(left_, 2, kFractalSide * split_.step * sizeof(T));
        pipe.InitBuffer(right_, 2, split_.tileElements * sizeof(T));
        pipe.InitBuffer(sum_, 2, kFractalSide * split_.rowsAtOnce * sizeof(float));
        tokens_.SetAll(sizes.tokens);
    }

    __aicore__ inline void Bind(GM_ADDR x, GM_ADDR w, GM_ADDR a, GM_ADDR b, GM_ADDR bias, GM_ADDR y)
    {
        x_ = {Global<T>(x), sizes_.inFeatures};
        w_ = {Global<T>(w), sizes_.inFeatures};
        a_ = {Global<T>(a), sizes_.inFeatures};
        b_ = {Global<T>(b), sizes_.rank};
        bias_ = Global<T>(bias);
        y_ = {Global<T>(y), sizes_.outFeatures};
    }

    // A part of x A^T.
    __aicore__ inline void Shrink()
    {
        const auto slice = static_cast<uint32_t>(AscendC::GetBlockIdx());
        if (slice < split_.shrinkSlices) {
            const uint64_t at = uint64_t{slice} * exchange_.stride;
            AscendC::LocalTensor<float> sum = sum_.template AllocTensor<float>();
            MultiplyX(sum, a_, {0, sizes_.rank}, Share(sizes_.inFeatures, kFractalSide, split_.shrinkSlices, slice));
            Store<float>({exchange_.partials[at], sizes_.rank}, sum, sizes_.rank);
        }
        AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kPartialsWritten);
    }

    // A slice of y. The plan leaves no core without one.
    __aicore__ inline void Expand()
    {
        const Range mine = Share(sizes_.outFeatures, kFractalSide, static_cast<uint32_t>(AscendC::GetBlockNum()),
            static_cast<uint32_t>(AscendC::GetBlockIdx()));
        Range rows = TileOf(mine, mine.begin, split_.rowsAtOnce);
        while (rows.Size() > 0) {
            AscendC::LocalTensor<float> sum = sum_.template AllocTensor<float>();
            MultiplyX(sum, w_, rows, {0, sizes_.inFeatures});
            if (rows.begin == mine.begin) {
                AscendC::CrossCoreWaitFlag(kLowWritten);
            }
            AddProduct(sum, {exchange_.low, sizes_.rank}, b_, rows, sizes_.rank, true);
            if (sizes_.hasBias != 0) {
                AddBias(sum, rows);
            }
            Store(y_.From(rows.begin), sum, rows.Size());
            rows = TileOf(mine, rows.end, split_.rowsAtOnce);
        }
    }

private:
    // Tiles in L1, most of them still arriving: each takes one of eight event ids.
    static constexpr uint32_t kLeftStages = 2;
    static constexpr uint32_t kWeightStages = 6;

    // sum = x m^T, for some rows of m and a slice of K, which is outermost, so that x is read once too.
    __aicore__ inline void MultiplyX(
        const AscendC::LocalTensor<float>& sum, const Window<T>& m, const Range& rows, const Range& slice)
    {
        for (uint32_t k = slice.begin; k < slice.end; k += split_.step) {
            AddProduct(sum, x_.From(k), m.From(k), rows, Least(split_.step, slice.end - k), k > slice.begin);
        }
    }

    // sum += left m^T, or sum = left m^T. depth is at most a step.
    __aicore__ inline void AddProduct(const AscendC::LocalTensor<float>& sum, const Window<T>& left, const Window<T>& m,
        const Range& rows, uint32_t depth, bool add)
    {
        AscendC::LocalTensor<T> in = leftIn_.template AllocTensor<T>();
        LoadTile(in, left, tokens_, depth);
        AscendC::LocalTensor<T> factor = ToL0(left_, leftIn_, in, kFractalSide * RoundToFractal(depth));
        if (add) {
            AscendC::PipeBarrier<PIPE_M>();
        }
        const uint32_t most = split_.tileElements / RoundToFractal(depth) / kFractalSide * kFractalSide;
        for (Range tile = TileOf(rows, rows.begin, most); tile.Size() > 0; tile = TileOf(rows, tile.end, most)) {
            const uint32_t pitch = RoundToFractal(tile.Size());
            AscendC::LocalTensor<T> weights = weightsIn_.template AllocTensor<T>();
            LoadRows(weights, m.Row(tile.begin), tile.Size(), depth, m.stride, pitch);
            AscendC::LocalTensor<T> right = ToL0(right_, weightsIn_, weights, pitch * RoundToFractal(depth));
            Multiply(
                sum[(tile.begin - rows.begin) * kFractalSide], factor, right, sizes_.tokens, tile.Size(), depth, add);
            right_.FreeTensor(right);
        }
        left_.FreeTensor(factor);
    }

    // sum += ones bias, a product of depth 1: exact, so y is still rounded once.
    __aicore__ inline void AddBias(const AscendC::LocalTensor<float>& sum, const Range& rows)
    {
        AscendC::LocalTensor<T> in = leftIn_.template AllocTensor<T>();
        AscendC::DataCopy(in, exchange_.constant, kFractalSize);
        AscendC::LocalTensor<T> ones = ToL0(left_, leftIn_, in, kFractalSize);
        AscendC::LocalTensor<T> bias = weightsIn_.template AllocTensor<T>();
        LoadRows(bias, bias_[rows.begin], 1, rows.Size(), rows.Size(), kFractalSide);
        weightsIn_.EnQue(bias);
        bias = weightsIn_.template DeQue<T>();
        AscendC::LocalTensor<T> right = right_.template AllocTensor<T>();
        LoadRightTransposed(right, bias, rows.Size(), 1);
        weightsIn_.FreeTensor(bias);
        right_.EnQue(right);
        right = right_.template DeQue<T>();
        AscendC::PipeBarrier<PIPE_M>();
        Multiply(sum, ones, right, sizes_.tokens, rows.Size(), 1, true);
        right_.FreeTensor(right);
        left_.FreeTensor(ones);
    }

    // Moves a tile from L1, where it has the layout of L0A or L0B, to there.
    template <typename Queue, typename In>
    __aicore__ inline AscendC::LocalTensor<T> ToL0(
        Queue& queue, In& stages, AscendC::LocalTensor<T>& stage, uint32_t elements)
    {
        stages.EnQue(stage);
        stage = stages.template DeQue<T>();
        AscendC::LocalTensor<T> tile = queue.template AllocTensor<T>();
        LoadFractals(tile, stage, elements);
        stages.FreeTensor(stage);
        queue.EnQue(tile);
        return queue.template DeQue<T>();
    }

    template <typename Out>
    __aicore__ inline void Store(const Window<Out>& dst, AscendC::LocalTensor<float>& sum, uint32_t columns)
    {
        sum_.EnQue(sum);
        sum = sum_.template DeQue<float>();
        StoreTile(dst, sum, tokens_, columns);
        sum_.FreeTensor(sum);
    }

    const LoraLinearTiling& sizes_;
    const LoraLinearCubeTiling& split_;
    const PrefillExchange<T>& exchange_;
    TileRows tokens_;
    Window<T> x_, w_, a_, b_, y_;
    AscendC::GlobalTensor<T> bias_;
    AscendC::TQue<AscendC::TPosition::A1, 1> leftIn_;
    AscendC::TQue<AscendC::TPosition::B1, 1> weightsIn_;
    AscendC::TQue<AscendC::TPosition::A2, 1> left_;
    AscendC::TQue<AscendC::TPosition::B2, 1> right_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> sum_;
};

template <typename T>
__aicore__ inline void LoraLinearFewTokens(GM_ADDR x, GM_ADDR w, GM_ADDR a, GM_ADDR b, GM_ADDR scale, GM_ADDR bias,
    GM_ADDR y, GM_ADDR workspace, const LoraLinearTiling& sizes)
{
    if constexpr (sizeof(T) == sizeof(half)) {  // the plan sends no other types here
        AscendC::TPipe pipe;
        const PrefillExchange<T> exchange(sizes.tokens, sizes.rank, sizes.cube.shrinkSlices, workspace);
        if ASCEND_IS_AIC {
            LoraLinearCube<T> cube(pipe, sizes, exchange);
            cube.Bind(x, w, a, b, bias, y);
            cube.Shrink();
            cube.Expand();
        }
        if ASCEND_IS_AIV {
            LoraLinearVector(pipe, sizes, exchange, scale);
        }
    }
}

}  // namespace mindlora
