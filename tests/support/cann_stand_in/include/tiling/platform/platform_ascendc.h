// The sizes of a chip, for the host sides: those of the simulator.
#pragma once

#include <cstdint>

#include "model/platform.h"

namespace platform_ascendc {

constexpr uint32_t kSystemWorkspace = 4096;

enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB };

class PlatformAscendC {
public:
    explicit PlatformAscendC(const void*) {}
    uint32_t GetCoreNumAic() const { return chip_.cubeCores; }
    uint32_t GetCoreNumAiv() const { return chip_.vectorCores; }
    // CANN's own part of a workspace, before the kernel's.
    uint32_t GetLibApiWorkSpaceSize() const { return kSystemWorkspace; }
    void GetCoreMemSize(const CoreMemType& type, uint64_t& size) const
    {
        const uint64_t sizes[] = {chip_.l0a, chip_.l0b, chip_.l0c, chip_.l1, chip_.l2, chip_.unifiedBuffer};
        size = sizes[static_cast<int>(type)];
    }

private:
    const ascendc_model::Platform& chip_ = ascendc_model::CurrentPlatform();
};

}  // namespace platform_ascendc
