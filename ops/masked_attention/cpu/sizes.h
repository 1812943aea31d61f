// The sizes of masked_attention, and what a tile of keys is to a panel of queries.
#pragma once

#include <cstdint>

namespace mindlora {

// So many keys are skipped together, if none of a panel of queries sees one.
constexpr int64_t kKeyTile = 32;
enum Kind : char { kHidden, kPartly, kWhole };

inline bool Shows(float mask) { return mask > -10000.0f; }

// Tensors [rows, tokens, heads, size].
struct AttentionSizes {
    int64_t rows, tokens, heads, key_heads, size;

    int64_t Group() const { return heads / key_heads; }

    // Where a head of a row begins.
    int64_t Query(int64_t row, int64_t head) const { return (row * tokens * heads + head) * size; }
    int64_t Key(int64_t row, int64_t head) const { return (row * tokens * key_heads + head) * size; }
};

}  // namespace mindlora
