// Tiles of RowProducts. Plain, for host and kernel.
#pragma once

#include <cstdint>

namespace mindlora {

constexpr uint32_t kLanes = 64;   // floats of one repeat
constexpr uint32_t kNarrow = 32;  // up to so many columns NarrowRowDots takes fewer repeats than RowDots

}  // namespace mindlora

struct RowProductsTiling {
    uint32_t rows;            // of a tile of the matrix, at most; a multiple of 8
    uint32_t columns;         // of a tile, at most; a multiple of 16
    uint32_t matrixElements;  // what a tile of the matrix may have
    uint32_t vectorElements;  // what a tile of vectors may have
};
