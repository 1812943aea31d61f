// What the host hands to the kernels of lora_linear. Plain, and a multiple of 8 bytes.
#pragma once

#include <cstdint>

#include "ascendc_common/row_products_tiling.h"

// On the vector cores. Every core owns some rows of A or a slice of N (rows of W and B, columns of y), or both.
struct LoraLinearVectorTiling {
    uint32_t tokensAtOnce;  // in one pass over the weights
    uint32_t rowsAtOnce;    // of W, whose sums are held on chip; a multiple of 16
    uint32_t expandRows;    // of a tile of B, at most; a multiple of 16
    RowProductsTiling products;
};

// On the cube cores. The first shrinkSlices cores own a slice of K of x A^T, and every core a slice of N.
struct LoraLinearCubeTiling {
    uint32_t shrinkSlices;
    uint32_t step;          // of K at a time, and no less than the rank; a multiple of 16
    uint32_t tileElements;  // of W, A or B at a time, a multiple of 16 steps
    uint32_t rowsAtOnce;    // of W, whose sums are held on chip; a multiple of 16
    uint32_t reduceTile;    // numbers of x A^T that a vector core adds up at a time
};

struct LoraLinearTiling {
    uint32_t tokens;
    uint32_t inFeatures;   // K
    uint32_t outFeatures;  // N
    uint32_t rank;
    uint32_t hasBias;
    uint32_t unused;
    LoraLinearVectorTiling vector;
    LoraLinearCubeTiling cube;
};
