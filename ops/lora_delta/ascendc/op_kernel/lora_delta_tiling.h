// What the host hands to the kernels of lora_delta. Plain, and a multiple of 8 bytes.
#pragma once

#include <cstdint>

#include "ascendc_common/prefill_tiling.h"

#include "ascendc_common/row_products_tiling.h"

// Decode. The cores [0, shrinkCores) own a slice of K each and shrink; the expandCores behind them own a slice of N
// each and expand. Without shrinkCores every core does both, for tokens of its own.
struct LoraDeltaDecodeTiling {
    uint32_t shrinkCores;
    uint32_t expandCores;
    uint32_t tokensAtOnce;  // a core holds x, y and x A^T of so many tokens on chip
    uint32_t expandRows;    // of a tile of B, at most; a multiple of 16
    RowProductsTiling products;
};

struct LoraDeltaTiling {
    uint32_t tokens;
    uint32_t inFeatures;   // K
    uint32_t outFeatures;  // N
    uint32_t rank;
    LoraDeltaDecodeTiling decode;
    mindlora::PrefillTiling prefill;
};
