// Dot products of a matrix's rows with one vector: shrink (rows of A with x) and expand (rows of B with x A^T).
#pragma once

#include "ascendc_common/row_products_tiling.h"
#include "ascendc_common/share.h"
#include "kernel_operator.h"

namespace mindlora {

constexpr uint32_t kDotRows = 64;  // rows of one instruction
constexpr uint32_t kDotScratch = kDotRows * kLanes;
constexpr uint32_t kMaxPitch = 255 * 8;  // of the matrix: a repeat stride of 8 bits, in data blocks of 8 floats

// A mask of the first columns, at most 8, of each of eight data blocks of 8 floats.
__aicore__ inline uint64_t ColumnsOfEight(uint32_t columns)
{
    return columns >= 8 ? ~uint64_t{0} : 0x0101010101010101u * ((uint64_t{1} << columns) - 1);
}

// dots[i * step] = sum over j < columns of matrix[i * pitch + j] * vector[j], for i < rows. 1 <= columns <= pitch,
// pitch a multiple of 8 up to kMaxPitch; scratch has kDotScratch floats. Products go into 64 lanes a row, then lanes
// are summed up.
__aicore__ inline void RowDots(const AscendC::LocalTensor<float>& dots, const AscendC::LocalTensor<float>& matrix,
    const AscendC::LocalTensor<float>& vector, uint32_t rows, uint32_t columns, uint32_t pitch,
    const AscendC::LocalTensor<float>& scratch, uint32_t step = 1)
{
    // One repeat for each row; the vector stays where it is.
    const AscendC::BinaryRepeatParams rowByRow(1, 1, 1, kLanes / 8, static_cast<uint8_t>(pitch / 8), 0);
    const uint64_t width = Least(kLanes, columns);
    for (uint32_t row = 0; row < rows; row += kDotRows) {
        const auto repeats = static_cast<uint8_t>(Least(kDotRows, rows - row));
        const AscendC::LocalTensor<float> block = matrix[row * pitch];
        AscendC::Mul(scratch, block, vector, width, repeats, rowByRow);
        for (uint32_t column = kLanes; column < columns; column += kLanes) {
            const uint64_t lanes = Least(kLanes, columns - column);
            AscendC::MulAddDst(scratch, block[column], vector[column], lanes, repeats, rowByRow);
        }
        AscendC::WholeReduceSum(
            dots[row * step], scratch, static_cast<int32_t>(width), repeats, static_cast<int32_t>(step), 1, kLanes / 8);
    }
}

// RowDots with step 1 for rows that would leave most lanes idle: eight rows in one repeat, eight columns at a time.
__aicore__ inline void NarrowRowDots(const AscendC::LocalTensor<float>& dots, const AscendC::LocalTensor<float>& matrix,
    const AscendC::LocalTensor<float>& vector, uint32_t rows, uint32_t columns, uint32_t pitch,
    const AscendC::LocalTensor<float>& scratch)
{
    // A data block of each of eight rows, times the same block of the vector.
    const AscendC::BinaryRepeatParams eightRows(
        1, static_cast<uint8_t>(pitch / 8), 0, 8, static_cast<uint8_t>(pitch), 0);
    uint32_t count = 0;
    for (uint32_t row = 0; row < rows; row += count) {
        const uint32_t left = rows - row;
        count = left < 8 ? left : Least(kDotScratch / 8, left / 8 * 8);
        const auto repeats = static_cast<uint8_t>((count + 7) / 8);
        const uint64_t ofRows = count < 8 ? (uint64_t{1} << (8 * count)) - 1 : ~uint64_t{0};
        const AscendC::LocalTensor<float> block = matrix[row * pitch];
        uint64_t first[2] = {ofRows & ColumnsOfEight(columns), 0};
        AscendC::Mul(scratch, block, vector, first, repeats, eightRows);
        for (uint32_t column = 8; column < columns; column += 8) {
            uint64_t lanes[2] = {ofRows & ColumnsOfEight(columns - column), 0};
            AscendC::MulAddDst(scratch, block[column], vector[column], lanes, repeats, eightRows);
        }
        AscendC::BlockReduceSum(dots[row], scratch, repeats, first, 1, 1, 8);
    }
}

}  // namespace mindlora
