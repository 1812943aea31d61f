// Rows of a matrix between global memory and the unified buffer, and between their type and float.
#pragma once

#include "kernel_operator.h"

namespace mindlora {

// Whether a type is float itself, which needs no widening.
template <class T>
constexpr bool kIsFloat = sizeof(T) == sizeof(float);

template <class T>
__aicore__ inline AscendC::GlobalTensor<T> Global(GM_ADDR address)
{
    AscendC::GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer((__gm__ T*)address);
    return tensor;
}

// The number of elements from one row on chip to the next: rows start at data blocks of 32 bytes.
template <class T>
__aicore__ inline uint32_t PitchOf(uint32_t columns)
{
    constexpr uint32_t block = 32 / sizeof(T);
    return (columns + block - 1) / block * block;
}

// `rows` rows of `columns` elements, `stride` elements apart in global memory and PitchOf<T>(columns) apart on chip.
// What follows a row on chip has no meaning.
template <class T>
__aicore__ inline void CopyRowsIn(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from,
    uint32_t rows, uint32_t columns, uint64_t stride)
{
    AscendC::DataCopyPadExtParams<T> padding;
    if (stride == columns && PitchOf<T>(columns) == columns) {  // one piece
        columns *= rows;
        stride = columns;
        rows = 1;
    }
    AscendC::DataCopyExtParams blocks(static_cast<uint16_t>(rows), static_cast<uint32_t>(columns * sizeof(T)),
        static_cast<uint32_t>((stride - columns) * sizeof(T)), 0, 0);
    AscendC::DataCopyPad(to, from, blocks, padding);
}

template <class T>
__aicore__ inline void CopyRowsOut(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<T>& from,
    uint32_t rows, uint32_t columns, uint64_t stride)
{
    if (stride == columns && PitchOf<T>(columns) == columns) {
        columns *= rows;
        stride = columns;
        rows = 1;
    }
    AscendC::DataCopyExtParams blocks(static_cast<uint16_t>(rows), static_cast<uint32_t>(columns * sizeof(T)), 0,
        static_cast<uint32_t>((stride - columns) * sizeof(T)), 0);
    AscendC::DataCopyPad(to, from, blocks);
}

// `count` elements as float: in `wide`, or in place if they are float already. PIPE_V.
template <class T>
__aicore__ inline AscendC::LocalTensor<float> Widened(
    const AscendC::LocalTensor<T>& narrow, const AscendC::LocalTensor<float>& wide, uint32_t count)
{
    if constexpr (kIsFloat<T>) {
        return narrow;
    } else {
        AscendC::Cast(wide, narrow, AscendC::RoundMode::CAST_NONE, count);
        return wide;
    }
}

// The one rounding of a result, to nearest even; `count` in whole data blocks. PIPE_V.
template <class T>
__aicore__ inline void Narrow(
    const AscendC::LocalTensor<T>& narrow, const AscendC::LocalTensor<float>& wide, uint32_t count)
{
    if constexpr (kIsFloat<T>) {
        AscendC::DataCopy(narrow, wide, count);
    } else {
        AscendC::Cast(narrow, wide, AscendC::RoundMode::CAST_RINT, count);
    }
}

}  // namespace mindlora
