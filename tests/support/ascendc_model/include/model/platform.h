// What one chip offers. Host tiling asks for these numbers through tiling/platform/platform_ascendc.h; the
// simulator checks kernels against the same description.
#pragma once

#include <cstdint>

namespace ascendc_model {

// Atlas A2 (910B, NPU architecture 2201). The unified buffer and L1 are what CANN's GetCoreMemSize returns on A2 and
// A3: 256 bytes less than the chip has.
struct Platform {
    uint32_t cubeCores = 24;
    uint32_t vectorCores = 48;
    uint64_t unifiedBuffer = 192 * 1024 - 256;
    uint64_t l1 = 512 * 1024 - 256;
    uint64_t l0a = 64 * 1024;
    uint64_t l0b = 64 * 1024;
    uint64_t l0c = 128 * 1024;
    uint64_t l2 = 192 * 1024 * 1024;
};

inline Platform& CurrentPlatform()
{
    static Platform platform;
    return platform;
}

}  // namespace ascendc_model
