// How a kernel is launched: what an operator's host side works out from shapes, and its kernel is told.
// Plain C++, so that CANN's tiling function and the tests in the functional model share one source.
#pragma once

#include <cstdint>

namespace mindlora {

// What the host asks platform_ascendc::PlatformAscendC for. No size of a chip is written down anywhere else.
struct Platform {
    uint32_t cubeCores;
    uint32_t vectorCores;
    uint64_t unifiedBuffer;  // bytes, as all that follow
    uint64_t l1;
    uint64_t l0a;
    uint64_t l0b;
    uint64_t l0c;
};

enum class KernelKind : uint32_t { kVector, kVectorSynchronized, kCubeAndVector };

// Tiling is the operator's plain structure that reaches the kernel byte by byte.
template <class Tiling>
struct Plan {
    Tiling tiling;
    uint32_t blocks;
    uint64_t tilingKey;
    uint64_t workspace;  // bytes of global memory, 0 for none; what it holds at the start is not known
    KernelKind kind;     // as the kernel's KERNEL_TASK_TYPE for this key
};

}  // namespace mindlora
