// Rows that are multiplied together: runs of neighbours in global memory, consecutive on chip.
#pragma once

#include "ascendc_common/cube.h"
#include "ascendc_common/prefill_tiling.h"

namespace mindlora {

// Up to kPrefillTileRows rows of a window of as many.
struct TileRows {
    uint32_t count;
    uint32_t runs;
    uint8_t first[kPrefillTileRows];  // of a run, in the window
    uint8_t length[kPrefillTileRows];

    // Add rows in ascending order.
    __aicore__ inline void Add(uint32_t row)
    {
        if (runs == 0 || first[runs - 1] + length[runs - 1] != row) {
            first[runs] = row;
            length[runs++] = 0;
        }
        ++length[runs - 1];
        ++count;
    }

    __aicore__ inline void SetNone()
    {
        count = 0;
        runs = 0;
    }

    __aicore__ inline void SetAll(uint32_t rows)
    {
        count = rows;
        runs = 1;
        first[0] = 0;
        length[0] = rows;
    }
};

// A window of a matrix in global memory.
template <typename T>
struct Window {
    AscendC::GlobalTensor<T> at;
    uint32_t stride;

    __aicore__ inline AscendC::GlobalTensor<T> Row(uint32_t row) const { return at[uint64_t{row} * stride]; }
    __aicore__ inline Window From(uint32_t column) const { return {at[column], stride}; }
};

// To L1, as the left side of a product of CubeRows(rows.count) rows.
template <typename T>
__aicore__ inline void LoadTile(
    const AscendC::LocalTensor<T>& dst, const Window<T>& src, const TileRows& rows, uint32_t columns)
{
    const uint32_t pitch = RoundToFractal(rows.count);
    uint32_t at = 0;
    for (uint32_t run = 0; run < rows.runs; ++run) {
        LoadRows(dst[at * kFractalSide], src.Row(rows.first[run]), rows.length[run], columns, src.stride, pitch);
        at += rows.length[run];
    }
    if (rows.count == 1) {
        LoadRows(dst[kFractalSide], src.Row(rows.first[0]), 1, columns, src.stride, pitch);
    }
}

// A sum in L0C to global memory, rounded to T.
template <typename T>
__aicore__ inline void StoreTile(
    const Window<T>& dst, const AscendC::LocalTensor<float>& sum, const TileRows& rows, uint32_t columns)
{
    AscendC::FixpipeParamsV220 params;
    params.nSize = columns;
    params.srcStride = RoundToFractal(rows.count);
    params.dstStride = dst.stride;
    params.quantPre = CubeType<T>::kFromFloat;
    uint32_t at = 0;
    for (uint32_t run = 0; run < rows.runs; ++run) {
        params.mSize = rows.length[run];
        AscendC::Fixpipe<T, float, AscendC::CFG_ROW_MAJOR>(dst.Row(rows.first[run]), sum[at * kFractalSide], params);
        at += rows.length[run];
    }
}

}  // namespace mindlora
