// Products of a few vectors with the rows of a matrix that is streamed from global memory, each element once. Sums are
// float; two tiles are being read while one is widened.
#pragma once

#include "ascendc_common/copy.h"
#include "ascendc_common/row_dots.h"
#include "ascendc_common/row_products_tiling.h"
#include "ascendc_common/share.h"
#include "kernel_operator.h"

namespace mindlora {

// A row-major matrix in global memory, or some rows of it.
template <class T>
struct Matrix {
    AscendC::GlobalTensor<T> data;
    uint32_t columns;

    __aicore__ inline AscendC::GlobalTensor<T> At(uint32_t row, uint32_t column) const
    {
        return data[uint64_t{row} * columns + column];
    }
};

template <class T>
class RowProducts {
public:
    // mostRows: of any tile.
    __aicore__ inline void Init(AscendC::TPipe& pipe, const RowProductsTiling& tiles, uint32_t mostRows)
    {
        tiles_ = tiles;
        AscendC::TBuf<> dots, scratch, matrixWide, vectorsWide;
        pipe.InitBuffer(matrixIn_, 2, tiles_.matrixElements * sizeof(T));
        pipe.InitBuffer(vectorsIn_, 2, tiles_.vectorElements * sizeof(T));
        pipe.InitBuffer(matrixWide, kIsFloat<T> ? 32 : tiles_.matrixElements * sizeof(float));
        pipe.InitBuffer(vectorsWide, kIsFloat<T> ? 32 : tiles_.vectorElements * sizeof(float));
        pipe.InitBuffer(dots, mostRows * sizeof(float));
        pipe.InitBuffer(scratch, kDotScratch * sizeof(float));
        matrixWide_ = matrixWide.Get<float>();
        vectorsWide_ = vectorsWide.Get<float>();
        dots_ = dots.Get<float>();
        scratch_ = scratch.Get<float>();
    }

    // sums[v * sumsPitch + i] = sum over columns c of x[first + v, c] * m[rows.begin + i, c], for v < vectors. Columns
    // are outermost, so that x is read once too.
    __aicore__ inline void Multiply(const AscendC::LocalTensor<float>& sums, uint32_t sumsPitch, const Matrix<T>& x,
        uint32_t first, uint32_t vectors, const Matrix<T>& m, const Range& rows, const Range& columns)
    {
        if (rows.Size() == 0) {
            return;
        }
        AscendC::Duplicate(sums, 0.0f, static_cast<int32_t>(vectors * sumsPitch));
        Range width = TileOf(columns, columns.begin, tiles_.columns);
        Range height = TileOf(rows, rows.begin, tiles_.rows);
        SendVectors(x, first, vectors, width);
        SendMatrix(m, height, width);
        while (width.Size() > 0) {
            const Range nextWidth = TileOf(columns, width.end, tiles_.columns);
            const uint32_t pitch = PitchOf<T>(width.Size());
            SendVectors(x, first, vectors, nextWidth);
            AscendC::LocalTensor<T> raw = TakeVectors();
            const AscendC::LocalTensor<float> wide = WidenVectors(raw, vectors * pitch);
            while (height.Size() > 0) {
                const Range nextHeight = TileOf(rows, height.end, tiles_.rows);
                if (nextHeight.Size() > 0) {
                    SendMatrix(m, nextHeight, width);
                } else {
                    SendMatrix(m, TileOf(rows, rows.begin, tiles_.rows), nextWidth);
                }
                AddTile(sums[height.begin - rows.begin], sumsPitch, wide, pitch, vectors, height.Size(), width.Size());
                height = nextHeight;
            }
            FreeVectors(raw);
            height = TileOf(rows, rows.begin, tiles_.rows);
            width = nextWidth;
        }
    }

    // Takes the next tile: sums[v * sumsPitch + i] += vectors[v * vectorsPitch, ...] * row i of it.
    __aicore__ inline void AddTile(const AscendC::LocalTensor<float>& sums, uint32_t sumsPitch,
        const AscendC::LocalTensor<float>& vectors, uint32_t vectorsPitch, uint32_t count, uint32_t rows,
        uint32_t columns)
    {
        const uint32_t pitch = PitchOf<T>(columns);
        AscendC::LocalTensor<T> raw = matrixIn_.template DeQue<T>();
        const AscendC::LocalTensor<float> matrix = Widened(raw, matrixWide_, rows * pitch);
        for (uint32_t v = 0; v < count; ++v) {
            if (columns <= kNarrow) {
                NarrowRowDots(dots_, matrix, vectors[v * vectorsPitch], rows, columns, pitch, scratch_);
            } else {
                RowDots(dots_, matrix, vectors[v * vectorsPitch], rows, columns, pitch, scratch_);
            }
            AscendC::Add(sums[v * sumsPitch], sums[v * sumsPitch], dots_, static_cast<int32_t>(rows));
        }
        matrixIn_.FreeTensor(raw);
    }

    // Tiles are taken in the order in which they were requested, up to two ahead of each kind. Empty tiles do not
    // count.
    __aicore__ inline void SendMatrix(const Matrix<T>& m, const Range& rows, const Range& columns)
    {
        Send(matrixIn_, m, rows, columns);
    }

    __aicore__ inline void SendVectors(const Matrix<T>& m, uint32_t first, uint32_t count, const Range& columns)
    {
        Send(vectorsIn_, m, {first, first + count}, columns);
    }

    __aicore__ inline AscendC::LocalTensor<T> TakeVectors() { return vectorsIn_.template DeQue<T>(); }
    __aicore__ inline void FreeVectors(AscendC::LocalTensor<T>& raw) { vectorsIn_.FreeTensor(raw); }

    // One set at a time; in float it is raw itself.
    __aicore__ inline AscendC::LocalTensor<float> WidenVectors(const AscendC::LocalTensor<T>& raw, uint32_t count)
    {
        return Widened(raw, vectorsWide_, count);
    }

private:
    using In = AscendC::TQue<AscendC::TPosition::VECIN, 2>;

    __aicore__ inline void Send(In& queue, const Matrix<T>& m, const Range& rows, const Range& columns)
    {
        if (rows.Size() > 0 && columns.Size() > 0) {
            AscendC::LocalTensor<T> tile = queue.template AllocTensor<T>();
            CopyRowsIn(tile, m.At(rows.begin, columns.begin), rows.Size(), columns.Size(), m.columns);
            queue.EnQue(tile);
        }
    }

    RowProductsTiling tiles_;
    In matrixIn_, vectorsIn_;
    AscendC::LocalTensor<float> matrixWide_, vectorsWide_, dots_, scratch_;
};

}  // namespace mindlora
