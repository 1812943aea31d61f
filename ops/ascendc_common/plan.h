// How a kernel is launched: what an operator's host side derives from shapes and hands to the kernel.
// Plain C++, so that CANN's tiling function and the tests in the simulator share one source.
#pragma once

#include <cstdint>

namespace mindlora {

// What the host asks platform_ascendc::PlatformAscendC for. No other place has the size of a chip.
struct Platform {
    uint32_t cubeCores;
    uint32_t vectorCores;
    uint64_t unifiedBuffer;  // bytes, as are all that follow
    uint64_t l1;
    uint64_t l0a;
    uint64_t l0b;
    uint64_t l0c;
};

// Bytes that the chip's memory moves while a core computes one repeat of its vector unit: 1.6 TB/s over 1.8 GHz, from
// public documents on the 910B. Plans compare bytes with repeats by it and depend on no other speed.
constexpr uint64_t kBytesPerRepeat = 889;

// A core is taken to draw up to so many times its even share of the memory's bandwidth. An assumption: 1 would have all
// cores share whatever they exchange, more would let fewer cores do with less exchange.
constexpr uint64_t kDraw = 3;

enum class KernelKind : uint32_t { kVector, kVectorSynchronized, kCubeAndVector };

// Tiling is the operator's plain structure, which is copied to the kernel byte by byte.
template <class Tiling>
struct Plan {
    Tiling tiling;
    uint32_t blocks;
    uint64_t tilingKey;
    uint64_t workspace;  // bytes of global memory, 0 for none; not initialized
    KernelKind kind;     // the kernel's KERNEL_TASK_TYPE for this key
};

}  // namespace mindlora
