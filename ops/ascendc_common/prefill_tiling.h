// How a LoRA product for many tokens is split over the cube cores: shrink (x A^T) by tokens and K, expand (... B^T) by
// tokens and N.
#pragma once

#include <cstdint>

namespace mindlora {

// Tiles of x, y0 and y are kPrefillTileRows tokens high and `step` of K or N wide.
constexpr uint32_t kPrefillTileRows = 64;
constexpr uint32_t kPrefillStages = 4;  // tiles of x or y0 in L1, most of them still arriving

struct PrefillTiling {
    uint32_t shrinkRows;    // tokens of a part of the shrink
    uint32_t shrinkDepth;   // its columns of K
    uint32_t shrinkSlices;  // slices of K
    uint32_t expandRows;    // tokens of a part of the expand
    uint32_t expandWidth;   // its columns of N
    uint32_t expandSlices;  // slices of N
    uint32_t step;
    uint32_t reduceTile;  // numbers of x A^T that a vector core adds up at a time
};

}  // namespace mindlora
