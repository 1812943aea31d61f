// Gather: elements of a tensor in the unified buffer, wherever the offsets say.
#pragma once

#include "vector.h"

namespace AscendC {

// dst[i] = the element of src at byte srcBaseAddr + srcOffset[i].
template <typename T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
    const uint32_t srcBaseAddr, const uint32_t count)
{
    using namespace ascendc_model;
    CheckType<int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>(
        "Gather", "dst", static_cast<const T*>(nullptr));
    if (count == 0) {
        return;
    }
    Instruction vector("Gather", PIPE_V, (uint64_t{count} * sizeof(T) + kRepeatBytes - 1) / kRepeatBytes);
    const LocalRef& to = dst.Ref();
    const LocalRef& from = src.Ref();
    const LocalRef& offsets = srcOffset.Ref();
    for (const auto& [tensor, operand] :
        {std::pair(&to, "dst"), std::pair(&from, "src"), std::pair(&offsets, "srcOffset")}) {
        vector.CheckSpace(*tensor, operand, {kUb});
        vector.CheckAligned(*tensor, operand, kDataBlock);
    }
    const uint64_t toEnd = to.begin + uint64_t{count} * sizeof(T);
    const uint64_t offsetsEnd = offsets.begin + uint64_t{count} * sizeof(uint32_t);
    if (to.begin < offsetsEnd && offsets.begin < toEnd) {
        Refuse("Gather", "srcOffset and dst overlap");
    }
    if (srcBaseAddr % sizeof(T) != 0) {
        Refuse("Gather", "srcBaseAddr is ", srcBaseAddr, ", which is not a multiple of the element's ", sizeof(T),
            " bytes");
    }
    // Not documented; so much does CANN's own CPU debugging ask of src, whatever the offsets are.
    const uint64_t repeats = (uint64_t{count} * sizeof(T) + kRepeatBytes - 1) / kRepeatBytes;
    const uint64_t wanted = std::min(kRepeatBytes, uint64_t{count} * sizeof(T)) + (repeats - 1) * kDataBlock;
    if (from.bytes < wanted) {
        Refuse("Gather", "src has ", from.bytes, " bytes, and CANN's CPU debugging wants ", wanted, " for ", repeats,
            " repeats");
    }
    vector.Read(offsets, "srcOffset", offsets.begin, offsetsEnd);
    std::vector<T> elements(count);
    for (uint32_t i = 0; i < count; ++i) {
        const auto offset = Load<uint32_t>(offsets, offsets.begin + uint64_t{i} * sizeof(uint32_t));
        if (offset % sizeof(T) != 0) {
            Refuse("Gather", "srcOffset ", i, " is ", offset, ", which is not a multiple of the element's ", sizeof(T),
                " bytes");
        }
        const uint64_t at = from.begin + srcBaseAddr + offset;
        vector.Read(from, "src", at, at + sizeof(T));
        if (to.begin < at + sizeof(T) && at < toEnd) {
            Refuse("Gather", "src and dst overlap");
        }
        elements[i] = Load<T>(from, at);
    }
    vector.Write(to, "dst", to.begin, toEnd);
    for (uint32_t i = 0; i < count; ++i) {
        Store(to, to.begin + uint64_t{i} * sizeof(T), elements[i]);
    }
}

}  // namespace AscendC
