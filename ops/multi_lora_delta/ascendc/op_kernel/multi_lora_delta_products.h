// Both products on tiles in UB, in float32. A tile's rows start at data blocks, `pitch` numbers apart.
#pragma once

#include "ascendc_common/row_dots.h"
#include "kernel_operator.h"

namespace mindlora {

constexpr uint32_t kBlockNumbers = 8;  // float32 numbers of a data block

// low[j * rows + m] = x[m] . a[j] over `width` numbers.
__aicore__ inline void ShrinkTile(const AscendC::LocalTensor<float>& low, const AscendC::LocalTensor<float>& x,
    const AscendC::LocalTensor<float>& a, const AscendC::LocalTensor<float>& scratch, uint32_t rows, uint32_t ranks,
    uint32_t width, uint32_t pitch)
{
    for (uint32_t m = 0; m < rows; ++m) {
        RowDots(low[m], a, x[m * pitch], ranks, width, pitch, scratch, rows);
    }
}

// y[m] += low[j * rows + m] b[j] over `width` numbers, where each number of low fills a data block.
__aicore__ inline void ExpandTile(const AscendC::LocalTensor<float>& y, const AscendC::LocalTensor<float>& low,
    const AscendC::LocalTensor<float>& b, uint32_t rows, uint32_t ranks, uint32_t width, uint32_t pitch)
{
    if (rows * kLanes < width) {  // a repeat is 64 columns of one row
        AscendC::SetMaskCount();
        AscendC::SetVectorMask<float, AscendC::MaskMode::COUNTER>(static_cast<int32_t>(width));
        for (uint32_t j = 0; j < ranks; ++j) {
            for (uint32_t m = 0; m < rows; ++m) {
                AscendC::MulAddDst<float, float, false>(y[m * pitch], b[j * pitch], low[(j * rows + m) * kBlockNumbers],
                    AscendC::MASK_PLACEHOLDER, 1, AscendC::BinaryRepeatParams(1, 1, 0, 8, 8, 0));
            }
        }
        AscendC::SetMaskNorm();
        AscendC::ResetMask();
        return;
    }
    const AscendC::BinaryRepeatParams rowByRow(1, 1, 0, static_cast<uint8_t>(pitch / kBlockNumbers), 0, 1);
    for (uint32_t j = 0; j < ranks; ++j) {  // a repeat is one row of 64 columns
        for (uint32_t n = 0; n < width; n += kLanes) {
            const uint64_t lanes = Least(kLanes, width - n);
            AscendC::MulAddDst(
                y[n], b[j * pitch + n], low[j * rows * kBlockNumbers], lanes, static_cast<uint8_t>(rows), rowByRow);
        }
    }
}

}  // namespace mindlora
