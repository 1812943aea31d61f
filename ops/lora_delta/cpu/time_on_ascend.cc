// What lora_delta takes on an Atlas A2 by its plan's own estimate, for the choice of a cell's path. Nothing here runs
// on an NPU.
#include <cstdint>

#include "lora_delta/ascendc/op_host/lora_delta_plan.h"

namespace {

// The largest Atlas A2, since a cell is made before its kernel's host side can ask for the chip.
constexpr mindlora::Platform kAtlasA2{24, 48, 192 * 1024 - 256, 512 * 1024 - 256, 64 * 1024, 64 * 1024, 128 * 1024};

}  // namespace

// Times in bytes that the chip's memory moves meanwhile: the least possible, that of the kernel, and that of plain
// operators, each of which reads its inputs and writes its output once; what one leaves for the next is in the cache.
extern "C" void mindlora_lora_delta_times(
    uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank, uint64_t elementBytes, uint64_t times[3])
{
    const uint64_t low = tokens * rank, wide = tokens * out;
    times[0] = (tokens * in + rank * (in + out) + 2 * wide) * elementBytes;
    times[1] = mindlora::PlanLoraDelta(tokens, in, out, rank, elementBytes, kAtlasA2).time;
    times[2] = times[0] + mindlora::Cached((4 * low + 2 * wide) * elementBytes);
}
