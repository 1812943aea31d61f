// What RowProducts takes of the unified buffer, and the tiles that fit. Plain C++, for the host.
#pragma once

#include <algorithm>

#include "ascendc_common/row_products_tiling.h"

namespace mindlora {

inline uint64_t CeilDiv(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit; }
inline uint64_t RoundUp(uint64_t value, uint64_t unit) { return CeilDiv(value, unit) * unit; }
inline uint64_t RoundDown(uint64_t value, uint64_t unit) { return value / unit * unit; }

// Of 192 KiB, 64 KiB go to tiles of the matrix (two as read, one widened), up to 24 KiB to tiles of vectors, and 20 KiB
// to the sums of a tile. `rows` are all rows of the matrix, `vectors` those used at a time, at most 48.
inline RowProductsTiling PlanRowProducts(uint64_t rows, uint64_t vectors, uint64_t unifiedBuffer)
{
    constexpr uint64_t kColumns = 256;  // whole bursts of global memory, and enough columns for the sum over 64 lanes
    const uint64_t matrix = RoundDown(unifiedBuffer / 24, 128);
    const uint64_t vector = RoundDown(unifiedBuffer / 64, 16);
    const uint64_t allRows = RoundUp(rows, 8);
    const uint64_t wanted = std::min(std::max(matrix / allRows, kColumns), matrix / 8);
    const uint64_t columns = RoundDown(std::min(vector / vectors, wanted), 16);
    RowProductsTiling tiles{};
    tiles.rows = std::min(allRows, RoundDown(matrix / columns, 8));
    tiles.columns = columns;
    tiles.matrixElements = matrix;
    tiles.vectorElements = vector;
    return tiles;
}

}  // namespace mindlora
