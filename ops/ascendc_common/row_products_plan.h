// What RowProducts takes of the unified buffer, and the tiles that fit. Plain C++, for the host.
#pragma once

#include <algorithm>

#include "ascendc_common/plan.h"
#include "ascendc_common/row_products_tiling.h"

namespace mindlora {

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

// Repeats that convert a matrix to float or back.
inline uint64_t ConversionRepeats(uint64_t rows, uint64_t columns, uint64_t elementBytes)
{
    return elementBytes == sizeof(float) ? 0 : CeilDiv(rows * RoundUp(columns, 32 / elementBytes), kLanes);
}

// Repeats of RowProducts for some vectors with a whole matrix, whose tiles have up to `width` columns, without those
// that convert the vectors.
inline uint64_t RowProductsRepeats(
    uint64_t rows, uint64_t columns, uint64_t width, uint64_t vectors, uint64_t elementBytes)
{
    const uint64_t tiles = CeilDiv(columns, width);
    const uint64_t dots =
        columns <= kNarrow ? CeilDiv(rows, 8) * (CeilDiv(columns, 8) + 1) : rows * (CeilDiv(columns, kLanes) + tiles);
    return vectors * (dots + tiles * CeilDiv(rows, kLanes)) + ConversionRepeats(rows, columns, elementBytes);
}

}  // namespace mindlora
