// The host's side: GM buffers, tiling, number and kind of cores; then the run and its report.
#pragma once

#include "flags.h"
#include "scheduler.h"

namespace ascendc_model {

class Launch {
public:
    LaunchOptions options;

    // Registers `bytes` at `data` and returns the address to pass to the kernel. Outputs are copied back after the run.
    uint8_t* Gm(const std::string& name, void* data, uint64_t bytes, GmAccess access)
    {
        return gm_.emplace_back(name, data, bytes, access).data();
    }

    Report Run(const std::function<void()>& kernel)
    {
        Report report;
        Device device(options, CoreCount());
        device.gm = &gm_;
        AddCores(device);
        CurrentDevice() = &device;
        try {
            const std::function<void()> body = [&kernel] {
                kernel();
                CheckEnd();
            };
            Scheduler(device, body).Run();
            CheckCrossCoreEnd(device);
            report.ok = true;
        } catch (const ModelError& error) {
            report.error = error.what();
        }
        CurrentDevice() = nullptr;
        for (GmBuffer& buffer : gm_) {
            buffer.CopyBack();
            if (buffer.writable()) {
                report.unwritten[buffer.name()] = static_cast<uint64_t>(
                    std::count(buffer.state().begin(), buffer.state().end(), GmBuffer::kUnwritten));
            }
        }
        for (const auto& core : device.cores) {
            AddTo(report, *core);
        }
        return report;
    }

private:
    bool HasCube() const
    {
        return options.kernelType != KERNEL_TYPE_AIV_ONLY && options.kernelType != KERNEL_TYPE_MIX_AIV_1_0;
    }

    uint32_t VectorsPerBlock() const
    {
        switch (options.kernelType) {
            case KERNEL_TYPE_AIC_ONLY:
            case KERNEL_TYPE_MIX_AIC_1_0: return 0;
            case KERNEL_TYPE_MIX_AIC_1_2: return 2;
            default: return 1;
        }
    }

    uint32_t CoreCount() const { return options.blocks * (VectorsPerBlock() + (HasCube() ? 1 : 0)); }

    void AddCores(Device& device) const
    {
        for (uint32_t block = 0; block < options.blocks; ++block) {
            if (HasCube()) {
                AddCore(device, true, block, 0, 1);
            }
            for (uint32_t sub = 0; sub < VectorsPerBlock(); ++sub) {
                AddCore(device, false, block, sub, VectorsPerBlock());
            }
        }
    }

    static void AddCore(Device& device, bool cube, uint32_t block, uint32_t subBlock, uint32_t perBlock)
    {
        const Platform& platform = CurrentPlatform();
        auto core = std::make_unique<Core>();
        core->index = static_cast<uint32_t>(device.cores.size());
        core->cube = cube;
        core->block = block;
        core->subBlock = subBlock;
        core->perBlock = perBlock;
        core->blockIdx = int64_t{block} * perBlock + subBlock;
        const uint64_t capacities[kSpaces] = {
            platform.unifiedBuffer, platform.l1, platform.l0a, platform.l0b, platform.l0c};
        for (int space = 0; space < kSpaces; ++space) {
            core->memories[space] = LocalMemory(static_cast<Space>(space), capacities[space]);
        }
        core->counters.name = core->Name();
        device.cores.push_back(std::move(core));
    }

    // What a core must have finished and freed when its kernel returns.
    static void CheckEnd()
    {
        Core& core = Me();
        const std::string api = "end of kernel";
        for (const QueueState& queue : core.queues) {
            for (const QueueBuffer& buffer : queue.buffers) {
                if (buffer.state != QueueBuffer::kIdle) {
                    Refuse(api, buffer.slot->name,
                        buffer.state == QueueBuffer::kEnqueued ? " was enqueued and never dequeued"
                                                               : " was never freed");
                }
            }
        }
        for (const auto& [pipes, bank] : core.events) {
            for (int id = 0; id < kEventIds; ++id) {
                const std::string name = Text(kPipeNames[pipes.first], "_", kPipeNames[pipes.second], " ", id);
                if (bank.events[id].set) {
                    Refuse(api, "SetFlag ", name, " has no WaitFlag");
                }
                if (bank.events[id].taken) {
                    Refuse(api, "AllocEventID ", name, " has no ReleaseEventID");
                }
            }
        }
        if (core.mask.counter) {
            Refuse(api, "SetMaskCount has no SetMaskNorm");
        }
        if (core.atomicType != nullptr) {
            Refuse(api, "SetAtomicAdd is still on; DisableDmaAtomic (SetAtomicNone) ends it");
        }
        // The core's memory is no longer needed.
        for (LocalMemory& memory : core.memories) {
            memory = LocalMemory();
        }
    }

    static void CheckCrossCoreEnd(Device& device)
    {
        for (const auto& core : device.cores) {
            device.current = core.get();
            for (int flag = 0; flag < kCrossCoreFlags; ++flag) {
                if (!core->crossCoreFlags[flag].empty()) {
                    Refuse("end of kernel", "cross-core flag ", flag, " was set and not waited for");
                }
            }
        }
        for (const auto& [key, group] : device.crossCoreGroups) {
            for (const auto& [index, sets] : group) {
                if (!sets.empty()) {
                    device.current = device.cores[index].get();
                    Refuse("end of kernel", "CrossCoreSetFlag of flag ", std::get<3>(key),
                        " was not answered by all cores of its group");
                }
            }
        }
    }

    static void AddTo(Report& report, const Core& core)
    {
        report.cores.push_back(core.counters);
        report.coresThatWorked += core.worked ? 1 : 0;
        for (const auto& [name, traffic] : core.counters.gm) {
            report.gm[name].read += traffic.read;
            report.gm[name].written += traffic.written;
        }
        for (const auto& [pipe, count] : json::ByName(core.counters.instructions)) {
            report.instructions[pipe] += count;
        }
        for (const auto& [space, bytes] : core.counters.peak) {
            report.peak[space] = std::max(report.peak[space], bytes);
        }
    }

    std::deque<GmBuffer> gm_;
};

}  // namespace ascendc_model
