// How a LoRA product for many tokens is split over the cube cores: shrink (x A^T) by tokens and K, expand (... B^T) by
// tokens and N.
#pragma once

#include <cstdint>

namespace mindlora {

// Tiles of x, y0 and y are kPrefillTileRows tokens high and `step` of K or N wide.
constexpr uint32_t kPrefillTileRows = 64;
constexpr uint32_t kPrefillStages = 4;  // tiles of x or y0 in L1, most of them on their way

struct PrefillTiling {
    uint32_t shrinkRows;    // a part of the shrink is so many tokens
    uint32_t shrinkDepth;   // by so much of K,
    uint32_t shrinkSlices;  // of which there are so many;
    uint32_t expandRows;    // a part of the expand is so many tokens
    uint32_t expandWidth;   // by so much of N,
    uint32_t expandSlices;  // of which there are so many
    uint32_t step;
    uint32_t reduceTile;  // numbers of x A^T that a vector core sums up at a time
};

}  // namespace mindlora
