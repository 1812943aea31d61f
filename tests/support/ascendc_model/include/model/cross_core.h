// Order between cores: CrossCoreSetFlag, CrossCoreWaitFlag, SyncAll.
#pragma once

#include "instruction.h"

namespace ascendc_model {

constexpr int kSyncAllFlag = kCrossCoreFlags;  // a flag of the simulator's own, besides the sixteen

template <class Belongs>
std::vector<Core*> CoresThat(const Belongs& belongs)
{
    std::vector<Core*> cores;
    for (const auto& core : TheDevice().cores) {
        if (belongs(*core)) {
            cores.push_back(core.get());
        }
    }
    return cores;
}

// One member of a group has arrived. Once all have, every target's counter goes up by one.
inline void Arrive(const char* api, int mode, int flag, int64_t block, bool cube, const std::vector<Core*>& members,
    const std::vector<Core*>& targets, Clocks::Snapshot snapshot)
{
    CrossCoreGroup& group = TheDevice().crossCoreGroups[{mode, block, cube, flag}];
    group[Me().index].push_back(std::move(snapshot));
    for (const Core* member : members) {
        if (group[member->index].empty()) {
            return;
        }
    }
    Clocks::Snapshot all;
    for (const Core* member : members) {
        Clocks::Merge(all, group[member->index].front());
        group[member->index].pop_front();
    }
    for (Core* target : targets) {
        target->crossCoreFlags[flag].push_back(all);
        if (target->crossCoreFlags[flag].size() > 15) {
            Refuse(api, "the counter of flag ", flag, " on ", target->Name(), " passes 15");
        }
    }
}

inline void WaitForFlag(const char* api, int flag)
{
    Core& core = Me();
    if (core.crossCoreFlags[flag].empty()) {
        core.waitsFor = flag == kSyncAllFlag ? std::string(api) : Text(api, "(", flag, ")");
        core.ready = [&core, flag] { return !core.crossCoreFlags[flag].empty(); };
        TheDevice().yield();
    }
    for (uint32_t pipe = 0; pipe < kPipes; ++pipe) {
        TheDevice().clocks.Learn(MyThread(static_cast<pipe_t>(pipe)), core.crossCoreFlags[flag].front());
    }
    core.crossCoreFlags[flag].pop_front();
}

inline void CheckScheduled(const char* api, bool needsBoth)
{
    const KernelMetaType type = TheDevice().options.kernelType;
    if (type == KERNEL_TYPE_AIV_ONLY || type == KERNEL_TYPE_AIC_ONLY) {
        Refuse(api,
            "kernels of type KERNEL_TYPE_AIV_ONLY and KERNEL_TYPE_AIC_ONLY run without the unit that "
            "synchronizes cores; use a MIX type");
    }
    if (needsBoth && (type == KERNEL_TYPE_MIX_AIV_1_0 || type == KERNEL_TYPE_MIX_AIC_1_0)) {
        Refuse(api, "this needs cube and vector cores: KERNEL_TYPE_MIX_AIC_1_1 or KERNEL_TYPE_MIX_AIC_1_2");
    }
}

// All cores of a kind can meet only if all run at once.
inline void CheckResident(const char* api, size_t cores, bool cube)
{
    const uint32_t present = cube ? CurrentPlatform().cubeCores : CurrentPlatform().vectorCores;
    if (cores > present) {
        Refuse(api, cores, " cores wait for one another on a chip of ", present);
    }
}

// SyncAll is built on flags 11 to 14.
inline void CheckNoFlagOfSyncAll(const char* api)
{
    if (TheDevice().syncAllUsed && (TheDevice().crossCoreFlagsUsed & 0x7800u) != 0) {
        Refuse(api, "SyncAll takes flags 11 to 14, which this kernel uses itself");
    }
}

inline int CheckFlagId(const char* api, uint16_t flagId)
{
    CheckRange(api, "flagId", flagId, 0, kCrossCoreFlags - 1);
    TheDevice().crossCoreFlagsUsed |= 1u << flagId;
    CheckNoFlagOfSyncAll(api);
    return flagId;
}

}  // namespace ascendc_model

namespace AscendC {

template <uint8_t modeId, pipe_t pipe>
void CrossCoreSetFlag(uint16_t flagId)
{
    using namespace ascendc_model;
    static_assert(modeId <= 2, "architecture 2201 has the modes 0, 1 and 2");
    static_assert(pipe != PIPE_S && pipe != PIPE_ALL, "CrossCoreSetFlag supports neither PIPE_S nor PIPE_ALL");
    const char* api = "CrossCoreSetFlag";
    const Core& me = Me();
    const int flag = CheckFlagId(api, flagId);
    CheckScheduled(api, modeId != 0);
    if (!HasPipe(me, pipe)) {
        Refuse(api, "this kind of core has no PIPE_", kPipeNames[pipe]);
    }
    if (modeId == 1 && me.cube) {
        Refuse(api, "mode 1 is for the vector cores of one AI core");
    }
    const auto alike = [&me](const Core& core) {
        return core.cube == me.cube && (modeId == 0 || core.block == me.block);
    };
    const auto opposite = [&me](const Core& core) { return core.cube != me.cube && core.block == me.block; };
    const std::vector<Core*> members = CoresThat(alike);
    if (modeId == 0) {
        CheckResident(api, members.size(), me.cube);
    }
    Arrive(api, modeId, flag, modeId == 0 ? -1 : me.block, me.cube, members,
        modeId == 2 ? CoresThat(opposite) : members, TheDevice().clocks.Ended(MyThread(pipe)));
}

// On architecture 2201 the template arguments have no effect: all pipes wait.
template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
void CrossCoreWaitFlag(uint16_t flagId)
{
    ascendc_model::WaitForFlag("CrossCoreWaitFlag", ascendc_model::CheckFlagId("CrossCoreWaitFlag", flagId));
}

template <bool isAIVOnly = true>
void SyncAll()
{
    using namespace ascendc_model;
    const char* api = "SyncAll";
    Device& device = TheDevice();
    CheckScheduled(api, !isAIVOnly);
    if (isAIVOnly && Me().cube) {
        Refuse(api, "SyncAll<true> is for vector cores; a mix kernel calls SyncAll<false>");
    }
    device.syncAllUsed = true;
    CheckNoFlagOfSyncAll(api);
    const std::vector<Core*> members = CoresThat([](const Core& core) { return !isAIVOnly || !core.cube; });
    CheckResident(api, CoresThat([](const Core& core) { return !core.cube; }).size(), false);
    Clocks::Snapshot all;
    for (uint32_t pipe = 0; pipe < kPipes; ++pipe) {
        Clocks::Merge(all, device.clocks.Ended(MyThread(static_cast<pipe_t>(pipe))));
    }
    Arrive(api, isAIVOnly, kSyncAllFlag, -1, false, members, members, std::move(all));
    WaitForFlag(api, kSyncAllFlag);
}

}  // namespace AscendC
