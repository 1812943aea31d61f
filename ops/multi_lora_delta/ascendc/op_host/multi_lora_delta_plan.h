// How multi_lora_delta is launched, as far as that is known without the indices.
#pragma once

#include <algorithm>

#include "../op_kernel/multi_lora_delta_tiling.h"
#include "ascendc_common/plan.h"
#include "ascendc_common/prefill_plan.h"
#include "ascendc_common/row_products_tiling.h"

namespace mindlora {

struct MultiLoraDeltaSizes {
    int64_t tokens;
    int64_t slots;
    int64_t maxRank;
    int64_t in;   // K
    int64_t out;  // N
};

constexpr uint64_t kDecodeRound = 512;  // tokens at a time
constexpr uint64_t kPrefill = 129;      // so many tokens are hardly one row each of as many requests

// Bytes that the chip moves while a vector core multiplies a number by one of A or B: a repeat has 64 products, and
// sums and conversions take up to three quarters as many repeats again.
constexpr uint64_t kBytesPerProduct = kBytesPerRepeat * 7 / 4 / kLanes;

// Whether the cube is faster. Without the indices, it is known only where there are fewer slots than rows that rows
// share adapters and may have more arithmetic than bytes. Rows with an adapter each are bound by its bytes, which the
// vector cores read while they compute, and the cube before.
inline bool MultiLoraDeltaTakesCube(const MultiLoraDeltaSizes& sizes, uint64_t elementBytes, const Platform& chip)
{
    const uint64_t tokens = sizes.tokens, rank = sizes.maxRank, columns = uint64_t(sizes.in) + sizes.out;
    if (!TakesPrefill(tokens, rank, columns, elementBytes, chip)) {
        return false;
    }
    const uint64_t adapters = std::clamp<uint64_t>(sizes.slots, 1, tokens);
    const uint64_t bytes = (adapters * rank * columns + tokens * (sizes.in + 2 * uint64_t(sizes.out))) * elementBytes;
    const uint64_t products = tokens * rank * (columns + kLanes * chip.vectorCores);  // CoresFor counts them so too
    return tokens >= kPrefill || chip.cores == Cores::kCube || products * kBytesPerProduct > bytes * chip.vectorCores;
}

// As many as the table in UB that finds the rows of an adapter can hold.
inline int64_t MultiLoraDeltaMaxSlots(const Platform& chip)
{
    const uint64_t buffers = kDecodeBuffers * kDecodeTile * sizeof(float);
    return static_cast<int64_t>((chip.unifiedBuffer - buffers) / sizeof(int32_t) - kDecodeTables * kDecodeRound) -
        kDecodeKeys;
}

// K, N and maxRank from 1, K + N up to 2^30 - 1, maxRank up to 256, slots up to
// MultiLoraDeltaMaxSlots, any number of tokens. elementBytes is 2 or 4.
inline Plan<MultiLoraDeltaTiling> PlanMultiLoraDelta(
    const MultiLoraDeltaSizes& sizes, uint64_t elementBytes, const Platform& chip)
{
    MultiLoraDeltaTiling t{};
    t.tokens = static_cast<uint32_t>(sizes.tokens);
    t.slots = static_cast<uint32_t>(sizes.slots);
    t.maxRank = static_cast<uint32_t>(sizes.maxRank);
    t.in = static_cast<uint32_t>(sizes.in);
    t.out = static_cast<uint32_t>(sizes.out);
    if (MultiLoraDeltaTakesCube(sizes, elementBytes, chip)) {
        Plan<MultiLoraDeltaTiling> plan{t, 0, kMultiLoraDeltaPrefill, 0, KernelKind::kCubeAndVector};
        PlanPrefill(t.tokens, t.in, t.out, t.maxRank, chip, plan);
        return plan;
    }
    t.round = static_cast<uint32_t>(RoundUp(std::clamp<uint64_t>(t.tokens, 1, kDecodeRound), 8));
    t.together = std::min(kDecodeRows, kDecodeTile / t.maxRank);
    t.exchange = kMoreCores;
    static_assert(kDecodeHops * kCache == 3 * sizeof(float), "an exchange goes through the cache");
    t.bytesPerProduct = kBytesPerProduct;
    // A round has at most rank sums for each token, and a segment those of its rows. Each piece of a segment has
    // partial sums, and there are at most as many pieces as segments and cores together.
    const uint64_t rank = RoundUp(t.maxRank, 8);
    t.sums = static_cast<uint32_t>(t.round * rank);
    const uint64_t partial = t.sums + chip.vectorCores * std::min(t.round, t.together) * rank;
    const uint32_t blocks = t.tokens == 0 ? 1 : chip.vectorCores;
    return {t, blocks, kMultiLoraDeltaDecode, (t.sums + partial) * sizeof(float), KernelKind::kVectorSynchronized};
}

}  // namespace mindlora
