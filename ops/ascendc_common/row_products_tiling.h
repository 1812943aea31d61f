// Tiles of RowProducts. Plain, for host and kernel.
#pragma once

#include <cstdint>

struct RowProductsTiling {
    uint32_t rows;            // of a tile of the matrix, at most; a multiple of 8
    uint32_t columns;         // of a tile, at most; a multiple of 16
    uint32_t matrixElements;  // what a tile of the matrix may have
    uint32_t vectorElements;  // what a tile of vectors may have
};
