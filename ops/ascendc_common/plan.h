// How a kernel is launched: what an operator's host side derives from shapes and hands to the kernel.
// Plain C++, so that CANN's tiling function and the tests in the simulator share one source.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mindlora {

// A core is taken to draw up to so many tenths of its even share of the bandwidth. What it really draws is not known,
// but is between 1 and 3 times the share; of all values, plans by this one are the least far from the best ones, at
// worst over that range: tests/ops/ascendc/test_unknown_figures.py.
constexpr uint64_t kDrawTenths = 13;

// Nanoseconds by which a launch of cube and vector cores takes longer than one of vector cores alone. CANN's
// documentation has 20 to 21 us for starting all cores of an Atlas A2, and says that it grows with their number; the
// cube cores are a third of them. So it is between 0 and 7 us. Until it is measured none is counted: over that range,
// the choice between the kinds of cores then takes at worst 1.50 times the best, launches included, and with no other
// value less than 1.49: tests/ops/ascendc/test_unknown_figures.py.
constexpr uint64_t kMixLaunch = 0;

enum class Cores : uint32_t { kFaster, kVector, kCube };

// What the host asks platform_ascendc::PlatformAscendC for. No other place has the size of a chip.
struct Platform {
    uint32_t cubeCores;
    uint32_t vectorCores;
    uint64_t unifiedBuffer;  // bytes, as are all that follow
    uint64_t l1;
    uint64_t l0a;
    uint64_t l0b;
    uint64_t l0c;
    Cores cores = Cores::kFaster;  // the kind that an operator for both takes, where it can
    uint64_t drawTenths = kDrawTenths;
    uint64_t mixLaunch = kMixLaunch;
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
constexpr uint64_t kBytesPerNanosecond = 1600;

// How much faster the second-level cache is than the memory. It serves what cores exchange and what they read again:
// 192 MiB, and 3.8 TB/s for writing and 4.9 for reading by CANN's description of the chip (86 and 110 bytes a cycle and
// core), against 1.6.
constexpr uint64_t kCache = 2;

// Bytes of the cache, as bytes of the memory that take as long.
inline uint64_t Cached(uint64_t bytes) { return CeilDiv(bytes, kCache); }

// The time at best of cores out of `allCores`: the larger of bytes over bandwidth and repeats over clock.
inline uint64_t TimeAtBest(
    uint64_t bytes, uint64_t busiestBytes, uint64_t busiestRepeats, uint64_t allCores, const Platform& chip)
{
    return std::max({bytes, busiestBytes * allCores * 10 / chip.drawTenths, busiestRepeats * kBytesPerRepeat});
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
    uint64_t time;       // at best, in bytes that the memory moves meanwhile; 0 if nothing was chosen by it
};

}  // namespace mindlora
