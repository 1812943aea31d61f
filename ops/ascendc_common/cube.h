// Products of 16-bit matrices on the cube unit: left [rows, depth] times right [columns, depth]^T.
// In L1 a matrix is stored as fractals of 16 x 16, one column of fractals after the other (Nz).
#pragma once

#include "kernel_operator.h"

namespace mindlora {

constexpr uint32_t kFractalSide = 16;
constexpr uint32_t kFractalSize = kFractalSide * kFractalSide;

// The constants that depend on the type that cube cores read and write.
template <typename T>
struct CubeType;

template <>
struct CubeType<half> {
    static constexpr QuantMode_t kFromFloat = QuantMode_t::F322F16;
    static constexpr uint16_t kOne = 0x3C00;
};

template <>
struct CubeType<bfloat16_t> {
    static constexpr QuantMode_t kFromFloat = QuantMode_t::F322BF16;
    static constexpr uint16_t kOne = 0x3F80;
};

template <>
struct CubeType<float> {
    static constexpr QuantMode_t kFromFloat = QuantMode_t::NoQuant;
};

__aicore__ inline uint32_t Ceil(uint32_t size, uint32_t part) { return (size + part - 1) / part; }

__aicore__ inline uint32_t RoundToFractal(uint32_t size) { return Ceil(size, kFractalSide) * kFractalSide; }

// Rows of a matrix in global memory, `stride` elements apart, to L1, where a column of fractals has `pitch` rows. The
// tail of the last fractal column becomes zero; the rows that fill the last fractal row are left as they are.
template <typename T>
__aicore__ inline void LoadRows(const AscendC::LocalTensor<T>& dst, const AscendC::GlobalTensor<T>& src, uint32_t rows,
    uint32_t columns, uint32_t stride, uint32_t pitch)
{
    AscendC::DataCopy(dst, src, AscendC::Nd2NzParams(1, rows, columns, 0, stride, pitch, 1, 0));
}

// Mmad treats one row as a vector (GEMV), which is stored differently in L0A. So a single row counts as two.
__aicore__ inline uint32_t CubeRows(uint32_t rows) { return rows == 1 ? 2 : rows; }

// Neighbouring fractals of L1, in their order.
template <typename T>
__aicore__ inline void LoadFractals(
    const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, uint32_t elements)
{
    AscendC::LoadData(dst, src, AscendC::LoadData2DParams(0, elements / kFractalSize, 1, 0, 0, false, 0));
}

// L1 to L0A, which wants one row of fractals after the other.
template <typename T>
__aicore__ inline void LoadLeft(
    const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, uint32_t rows, uint32_t depth)
{
    const uint32_t down = RoundToFractal(rows) / kFractalSide;
    const uint32_t across = RoundToFractal(depth) / kFractalSide;
    const AscendC::LoadData2DParams row(0, across, down, 0, 0, false, 0);
    for (uint32_t i = 0; i < down; ++i) {
        AscendC::LoadData(dst[i * across * kFractalSize], src[i * kFractalSize], row);
    }
}

// `columns` of the `allColumns` rows of the right matrix in L1, to L0B. `src` begins at the first of them.
template <typename T>
__aicore__ inline void LoadRight(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
    uint32_t columns, uint32_t allColumns, uint32_t depth)
{
    for (uint32_t k = 0; k < depth; k += kFractalSide) {
        LoadFractals(dst[k * RoundToFractal(columns)], src[k * RoundToFractal(allColumns)],
            RoundToFractal(columns) * kFractalSide);
    }
}

// `columns` of a right matrix that is stored in L1 as it is multiplied, [depth, columns], to L0B.
template <typename T>
__aicore__ inline void LoadRightTransposed(
    const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, uint32_t columns, uint32_t depth)
{
    const uint32_t down = RoundToFractal(depth) / kFractalSide;
    const uint32_t across = RoundToFractal(columns) / kFractalSide;
    const AscendC::LoadData2DParams row(0, across, down, 0, 0, true, 0);
    for (uint32_t i = 0; i < down; ++i) {
        AscendC::LoadData(dst[i * across * kFractalSize], src[i * kFractalSize], row);
    }
}

// sum = left right^T, or sum += left right^T.
template <typename T>
__aicore__ inline void Multiply(const AscendC::LocalTensor<float>& sum, const AscendC::LocalTensor<T>& left,
    const AscendC::LocalTensor<T>& right, uint32_t rows, uint32_t columns, uint32_t depth, bool add)
{
    AscendC::MmadParams params;
    params.m = CubeRows(rows);
    params.n = columns;
    params.k = depth;
    params.cmatrixInitVal = !add;
    AscendC::Mmad(sum, left, right, params);
}

}  // namespace mindlora
