// The part of the host's platform query that tiling functions use, answered from the simulator's description of a chip.
#pragma once

#include "../../model/platform.h"

namespace platform_ascendc {

enum class CoreMemType { L0_A = 0, L0_B = 1, L0_C = 2, L1 = 3, L2 = 4, UB = 5, HBM = 6, RESERVED };

class PlatformAscendC {
public:
    uint32_t GetCoreNum() const { return GetCoreNumAiv(); }
    uint32_t GetCoreNumAic() const { return ascendc_model::CurrentPlatform().cubeCores; }
    uint32_t GetCoreNumAiv() const { return ascendc_model::CurrentPlatform().vectorCores; }

    void GetCoreMemSize(const CoreMemType& memType, uint64_t& size) const
    {
        const auto& platform = ascendc_model::CurrentPlatform();
        switch (memType) {
            case CoreMemType::L0_A: size = platform.l0a; break;
            case CoreMemType::L0_B: size = platform.l0b; break;
            case CoreMemType::L0_C: size = platform.l0c; break;
            case CoreMemType::L1: size = platform.l1; break;
            case CoreMemType::L2: size = platform.l2; break;
            case CoreMemType::UB: size = platform.unifiedBuffer; break;
            default: size = 0;
        }
    }
};

class PlatformAscendCManager {
public:
    static PlatformAscendC* GetInstance()
    {
        static PlatformAscendC platform;
        return &platform;
    }
};

}  // namespace platform_ascendc
