// What lora_delta takes on an Atlas A2 by its plan's own estimate, for the choice of a cell's path and for what is made
// of measured times. Nothing here runs on an NPU.
#include <cstdint>

#include "lora_delta/ascendc/op_host/lora_delta_plan.h"

namespace {

// The largest Atlas A2, since a cell is made before its kernel's host side can ask for the chip.
constexpr mindlora::Platform kAtlasA2{24, 48, 192 * 1024 - 256, 512 * 1024 - 256, 64 * 1024, 64 * 1024, 128 * 1024};

}  // namespace

// Times in bytes that the chip's memory moves meanwhile: the least possible, that of the kernel, and that of plain
// operators, each of which reads its inputs and writes its output once; what one leaves for the next is in the cache.
// `drawTenths` is what was measured, or 0.
extern "C" void mindlora_lora_delta_times(uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank,
    uint64_t elementBytes, uint64_t drawTenths, uint64_t times[3])
{
    const uint64_t low = tokens * rank, wide = tokens * out;
    mindlora::Platform chip = kAtlasA2;
    if (drawTenths > 0) chip.drawTenths = drawTenths;
    times[0] = (tokens * in + rank * (in + out) + 2 * wide) * elementBytes;
    times[1] = mindlora::PlanLoraDelta(tokens, in, out, rank, elementBytes, chip).time;
    times[2] = times[0] + mindlora::Cached((4 * low + 2 * wide) * elementBytes);
}

// Nanoseconds by which the cube cores are faster than the vector cores in 16 bits, not counting their launches.
extern "C" int64_t mindlora_lora_delta_gain_of_cube(uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank)
{
    mindlora::Platform chip = kAtlasA2;
    chip.cores = mindlora::Cores::kVector;
    const auto vector = static_cast<int64_t>(mindlora::PlanLoraDelta(tokens, in, out, rank, 2, chip).time);
    chip.cores = mindlora::Cores::kCube;
    const auto cube = static_cast<int64_t>(mindlora::PlanLoraDelta(tokens, in, out, rank, 2, chip).time);
    return (vector - cube) / static_cast<int64_t>(mindlora::kBytesPerNanosecond);
}
