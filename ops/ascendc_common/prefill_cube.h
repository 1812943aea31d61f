// What a cube core does with a tile of rows that share A and B. The operator decides which rows, and when.
#pragma once

#include "ascendc_common/prefill_exchange.h"
#include "ascendc_common/share.h"
#include "ascendc_common/tile_rows.h"

namespace mindlora {

// kColumns: B is stored as [r, N], not as [N, r].
template <typename T, bool kColumns>
class PrefillCube {
public:
    __aicore__ inline PrefillCube(AscendC::TPipe& pipe, const PrefillTiling& split, uint32_t mostRank) : split_(split)
    {
        const uint32_t rank = RoundToFractal(mostRank);
        const uint32_t tile = kPrefillTileRows * split.step;
        const uint32_t low = kPrefillTileRows * rank;
        const uint32_t slice = split.shrinkDepth < split.expandWidth ? split.expandWidth : split.shrinkDepth;
        pipe.InitBuffer(stages_, kPrefillStages, tile * sizeof(T));
        pipe.InitBuffer(weight_, 1, rank * slice * sizeof(T));
        pipe.InitBuffer(lowIn_, 1, low * sizeof(T));
        pipe.InitBuffer(left_, 2, tile * sizeof(T));
        pipe.InitBuffer(low_, 1, low * sizeof(T));
        pipe.InitBuffer(right_, 2, rank * split.step * sizeof(T));
        pipe.InitBuffer(identity_, kFractalSize * sizeof(T));
        pipe.InitBuffer(sum_, 2, (low < tile ? tile : low) * sizeof(float));
    }

    // A slice of A or B, which stays in L1 until FreeWeight.
    __aicore__ inline AscendC::LocalTensor<T> LoadWeight(
        const AscendC::GlobalTensor<T>& src, uint32_t rows, uint32_t columns, uint32_t stride)
    {
        AscendC::LocalTensor<T> weight = weight_.template AllocTensor<T>();
        LoadRows(weight, src, rows, columns, stride, RoundToFractal(rows));
        weight_.EnQue(weight);
        return weight_.template DeQue<T>();
    }

    __aicore__ inline void FreeWeight(AscendC::LocalTensor<T>& weight) { weight_.FreeTensor(weight); }

    // It stays in L0B and in no queue: of the eight event ids from M to MTE1, TPipe keeps three and the other buffers
    // take five. What is multiplied by it is loaded later, so waiting for that includes waiting for it.
    __aicore__ inline AscendC::LocalTensor<T> LoadIdentity(const AscendC::GlobalTensor<T>& src)
    {
        AscendC::LocalTensor<T> in = stages_.template AllocTensor<T>();
        AscendC::DataCopy(in, src, kFractalSize);
        stages_.EnQue(in);
        in = stages_.template DeQue<T>();
        const AscendC::LocalTensor<T> identity = identity_.template Get<T>();
        LoadFractals(identity, in, kFractalSize);
        stages_.FreeTensor(in);
        return identity;
    }

    // partial = x A^T over a slice of K.
    __aicore__ inline void Shrink(const Window<float>& partial, const Window<T>& x, const AscendC::LocalTensor<T>& a,
        const TileRows& rows, uint32_t rank, uint32_t allDepth)
    {
        AscendC::LocalTensor<float> sum = sum_.template AllocTensor<float>();
        for (uint32_t k = 0; k < allDepth; k += split_.step) {
            const uint32_t depth = Least(split_.step, allDepth - k);
            AscendC::LocalTensor<T> stage = LoadStage(x.From(k), rows, depth);
            AscendC::LocalTensor<T> left = left_.template AllocTensor<T>();
            LoadLeft(left, stage, rows.count, depth);
            stages_.FreeTensor(stage);
            left_.EnQue(left);
            left = left_.template DeQue<T>();
            AscendC::LocalTensor<T> right = right_.template AllocTensor<T>();
            LoadRight(right, a[k * RoundToFractal(rank)], rank, rank, depth);
            right_.EnQue(right);
            right = right_.template DeQue<T>();
            if (k > 0) {
                AscendC::PipeBarrier<PIPE_M>();
            }
            Multiply(sum, left, right, rows.count, rank, depth, k > 0);
            left_.FreeTensor(left);
            right_.FreeTensor(right);
        }
        Store(partial, sum, rows, rank);
    }

    // y = y0 + low B^T over a slice of N.
    __aicore__ inline void Expand(const Window<T>& y, const Window<T>& y0, const Window<T>& lowRows,
        const AscendC::LocalTensor<T>& b, const AscendC::LocalTensor<T>& identity, const TileRows& rows, uint32_t rank,
        uint32_t width)
    {
        AscendC::LocalTensor<T> low = LoadLow(lowRows, rows, rank);
        for (uint32_t column = 0; column < width; column += split_.step) {
            const uint32_t columns = Least(split_.step, width - column);
            AscendC::LocalTensor<T> left = LoadY0(y0.From(column), rows, columns);
            AscendC::LocalTensor<T> right = right_.template AllocTensor<T>();
            if constexpr (kColumns) {
                LoadRightTransposed(right, b[column * RoundToFractal(rank)], columns, rank);
            } else {
                LoadRight(right, b[column * kFractalSide], columns, width, rank);
            }
            right_.EnQue(right);
            right = right_.template DeQue<T>();
            AscendC::LocalTensor<float> sum = sum_.template AllocTensor<float>();
            Multiply(sum, low, right, rows.count, columns, rank, false);
            right_.FreeTensor(right);
            AscendC::PipeBarrier<PIPE_M>();
            MultiplyY0(sum, left, identity, rows.count, columns, true);
            left_.FreeTensor(left);
            Store(y.From(column), sum, rows, columns);
        }
        low_.FreeTensor(low);
    }

private:
    // A tile of x or y0 in L1.
    __aicore__ inline AscendC::LocalTensor<T> LoadStage(const Window<T>& src, const TileRows& rows, uint32_t columns)
    {
        AscendC::LocalTensor<T> stage = stages_.template AllocTensor<T>();
        LoadTile(stage, src, rows, columns);
        stages_.EnQue(stage);
        return stages_.template DeQue<T>();
    }

    // The rank-r rows of a tile in L0A.
    __aicore__ inline AscendC::LocalTensor<T> LoadLow(const Window<T>& src, const TileRows& rows, uint32_t rank)
    {
        AscendC::LocalTensor<T> in = lowIn_.template AllocTensor<T>();
        LoadTile(in, src, rows, rank);
        lowIn_.EnQue(in);
        in = lowIn_.template DeQue<T>();
        AscendC::LocalTensor<T> low = low_.template AllocTensor<T>();
        LoadLeft(low, in, rows.count, rank);
        lowIn_.FreeTensor(in);
        low_.EnQue(low);
        return low_.template DeQue<T>();
    }

    // A tile of y0 in L0A, one column of fractals after the other.
    __aicore__ inline AscendC::LocalTensor<T> LoadY0(const Window<T>& y0, const TileRows& rows, uint32_t columns)
    {
        AscendC::LocalTensor<T> stage = LoadStage(y0, rows, columns);
        AscendC::LocalTensor<T> left = left_.template AllocTensor<T>();
        LoadFractals(left, stage, RoundToFractal(rows.count) * RoundToFractal(columns));
        stages_.FreeTensor(stage);
        left_.EnQue(left);
        return left_.template DeQue<T>();
    }

    // Multiplied by the identity, y0 is added to the same sum as low B^T. That is exact, so y is rounded once.
    __aicore__ inline void MultiplyY0(const AscendC::LocalTensor<float>& sum, const AscendC::LocalTensor<T>& y0,
        const AscendC::LocalTensor<T>& identity, uint32_t rows, uint32_t columns, bool add)
    {
        for (uint32_t column = 0; column < columns; column += kFractalSide) {
            const uint32_t at = column * RoundToFractal(rows);
            Multiply(sum[at], y0[at], identity, rows, Least(kFractalSide, columns - column), kFractalSide, add);
        }
    }

    template <typename Out>
    __aicore__ inline void Store(
        const Window<Out>& dst, AscendC::LocalTensor<float>& sum, const TileRows& rows, uint32_t columns)
    {
        sum_.EnQue(sum);
        sum = sum_.template DeQue<float>();
        StoreTile(dst, sum, rows, columns);
        sum_.FreeTensor(sum);
    }

    const PrefillTiling& split_;
    AscendC::TQue<AscendC::TPosition::A1, 1> stages_;
    AscendC::TQue<AscendC::TPosition::B1, 1> weight_;
    AscendC::TQue<AscendC::TPosition::A1, 1> lowIn_;
    AscendC::TQue<AscendC::TPosition::A2, 1> left_;
    AscendC::TQue<AscendC::TPosition::A2, 1> low_;
    AscendC::TQue<AscendC::TPosition::B2, 1> right_;
    AscendC::TBuf<AscendC::TPosition::B2> identity_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> sum_;
};

}  // namespace mindlora
