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
