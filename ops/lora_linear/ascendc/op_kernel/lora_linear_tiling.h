// What the host tells the kernel of lora_linear. Plain, and a multiple of 8 bytes.
#pragma once

#include <cstdint>

#include "ascendc_common/row_products_tiling.h"

// Every core owns some rows of A or a slice of N (rows of W and B, columns of y), or both.
struct LoraLinearTiling {
    uint32_t tokens;
    uint32_t inFeatures;   // K
    uint32_t outFeatures;  // N
    uint32_t rank;
    uint32_t hasBias;
    uint32_t tokensAtOnce;  // in one pass over the weights
    uint32_t rowsAtOnce;    // of W, whose sums are held on chip; a multiple of 16
    uint32_t expandRows;    // of a tile of B, at most; a multiple of 16
    RowProductsTiling products;
};
