// How a kernel is launched: what an operator's host side derives from shapes and hands to the kernel.
// Plain C++, so that CANN's tiling function and the tests in the simulator share one source.
#pragma once

#include <algorithm>
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

inline uint64_t CeilDiv(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit; }
inline uint64_t RoundUp(uint64_t value, uint64_t unit) { return CeilDiv(value, unit) * unit; }
inline uint64_t RoundDown(uint64_t value, uint64_t unit) { return value / unit * unit; }

// Cube cores that have their two vector cores each; a chip may have none.
inline uint64_t PairedCubeCores(const Platform& chip) { return std::min(chip.cubeCores, chip.vectorCores / 2); }

// Bytes that the chip's memory moves while a core computes one repeat of its vector unit: 1.6 TB/s over 1.8 GHz, from
// public documents on the 910B. A time is counted in the bytes that the chip moves in it; no plan depends on any other
// speed.
constexpr uint64_t kBytesPerRepeat = 889;

// A core is taken to draw up to so many times its even share of the memory's bandwidth. An assumption: 1 would have all
// cores share whatever they exchange, more would let fewer cores do with less exchange.
constexpr uint64_t kDraw = 3;

// The time at best of cores out of `allCores`: the larger of bytes over bandwidth and repeats over clock.
inline uint64_t TimeAtBest(uint64_t bytes, uint64_t busiestBytes, uint64_t busiestRepeats, uint64_t allCores)
{
    return std::max({bytes, busiestBytes * CeilDiv(allCores, kDraw), busiestRepeats * kBytesPerRepeat});
}

// Of several splits of a product, plans take the fastest, or the one over the most cores whose exchange adds no more
// than 1/8 to the least bytes. The time at best does not see what more cores are good for: latencies, and each one's
// bandwidth.
constexpr uint64_t kMoreCores = 8;

inline uint64_t WithMoreCores(uint64_t leastBytes) { return leastBytes + leastBytes / kMoreCores; }

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
