// How multi_lora_slot_write is launched.
#pragma once

#include <algorithm>

#include "../op_kernel/multi_lora_slot_write_tiling.h"
#include "ascendc_common/plan.h"

namespace mindlora {

struct MultiLoraSlotWriteSizes {
    int64_t slots;
    int64_t maxRank;
    int64_t columns;  // K + N
    int64_t rank;     // rows of packed, up to maxRank
};

// elementBytes is 2 or 4.
inline Plan<MultiLoraSlotWriteTiling> PlanMultiLoraSlotWrite(
    const MultiLoraSlotWriteSizes& sizes, uint64_t elementBytes, const Platform& chip)
{
    constexpr uint64_t kUnitBytes = 2048;  // less is not worth another core
    MultiLoraSlotWriteTiling t{};
    t.block = static_cast<uint64_t>(sizes.maxRank) * sizes.columns;
    t.count = static_cast<uint64_t>(sizes.rank) * sizes.columns;
    t.slots = static_cast<uint32_t>(sizes.slots);
    t.rank = static_cast<uint32_t>(sizes.rank);
    t.tile = static_cast<uint32_t>(chip.unifiedBuffer / 4 / kUnitBytes * kUnitBytes / elementBytes);
    t.unit = static_cast<uint32_t>(kUnitBytes / elementBytes);
    const uint64_t units = std::max<uint64_t>(1, (t.count + t.unit - 1) / t.unit);
    const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(chip.vectorCores, units));
    return {t, blocks, 0, 0, KernelKind::kVector};
}

}  // namespace mindlora
