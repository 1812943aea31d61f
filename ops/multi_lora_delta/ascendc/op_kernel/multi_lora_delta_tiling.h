// What the host hands to the kernel of multi_lora_delta.
#pragma once

#include <cstdint>

#include "ascendc_common/prefill_tiling.h"

namespace mindlora {

// TILING_KEY_IS takes a literal, so the entry repeats these numbers.
enum MultiLoraDeltaWay : uint64_t { kMultiLoraDeltaDecode = 1, kMultiLoraDeltaPrefill = 2 };

// Sizes of the tiles of decode, in elements, for the host's plan and the kernel.
constexpr uint32_t kDecodeTile = 4096;  // a tile of a pool's block, of x or of y
constexpr uint32_t kDecodeWidth = 512;  // the most of K or N in a tile
constexpr uint32_t kDecodeStep = 16;    // K and N are dealt out to the cores in steps of so many
constexpr uint32_t kDecodeRows = 32;    // the most rows of one adapter that share a read of it
constexpr uint32_t kDecodeRanks = 32;   // the most rows of a pool's block in a tile
constexpr uint32_t kDecodeBuffers = 9;  // tiles of float32 in UB
constexpr uint32_t kDecodeTables = 7;   // numbers that a core keeps for a token,
constexpr uint32_t kDecodeHops = 6;  // bytes that a partial sum costs: written, added up and read in the cache (plan.h)
constexpr uint32_t kDecodeKeys = 2;  // and besides one for each slot (multi_lora_delta_segments.h)

constexpr uint32_t kPassTile = 4096;  // prefill: the most columns of a row that move without a product at a time

struct MultiLoraDeltaTiling {
    uint32_t tokens;
    uint32_t slots;
    uint32_t maxRank;
    uint32_t in;
    uint32_t out;
    uint32_t round;     // decode: tokens at a time, a multiple of 8
    uint32_t together;  // decode: rows of one adapter that share a read of it
    uint32_t exchange;  // decode: where bytes take longer than arithmetic, the exchange may add 1/exchange to them
    uint32_t bytesPerProduct;  // decode: what the chip moves while a core multiplies a number of x or low
    uint32_t sums;             // decode: float32 numbers of the workspace before the partial sums
    PrefillTiling prefill;
};

}  // namespace mindlora
