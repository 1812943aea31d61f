// One cube or vector core, and the launch that it belongs to.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "counters.h"
#include "memory.h"

namespace AscendC {

// Logical positions of a tensor, in the documented order.
enum class TPosition : uint8_t {
    GM,
    A1,
    A2,
    B1,
    B2,
    C1,
    C2,
    CO1,
    CO2,
    VECIN,
    VECOUT,
    VECCALC,
    LCM = VECCALC,
    SPM,
    SHM = SPM,
    TSCM,
    C2PIPE2GM,
    C2PIPE2LOCAL,
    MAX
};
using QuePosition = TPosition;  // the name in older documents

}  // namespace AscendC

enum KernelMetaType {
    KERNEL_TYPE_AIV_ONLY,
    KERNEL_TYPE_AIC_ONLY,
    KERNEL_TYPE_MIX_AIV_1_0,
    KERNEL_TYPE_MIX_AIC_1_0,
    KERNEL_TYPE_MIX_AIC_1_1,
    KERNEL_TYPE_MIX_AIC_1_2,
};

namespace ascendc_model {

constexpr int kEventIds = 8;
constexpr int kCrossCoreFlags = 16;

inline constexpr const char* kPositionNames[] = {"GM", "A1", "A2", "B1", "B2", "C1", "C2", "CO1", "CO2", "VECIN",
    "VECOUT", "VECCALC", "SPM", "TSCM", "C2PIPE2GM", "C2PIPE2LOCAL", "MAX"};

inline const char* Name(AscendC::TPosition position) { return kPositionNames[static_cast<int>(position)]; }

// The event ids of one ordered pair of pipes.
struct EventBank {
    struct Event {
        std::optional<Clocks::Snapshot> set;
        bool taken = false;    // by AllocEventID
        bool ofQueue = false;  // by a queue's buffer or TPipe
    };
    std::array<Event, kEventIds> events;
};

struct QueueBuffer {
    enum State { kIdle, kAllocated, kEnqueued, kDequeued };
    Slot* slot = nullptr;
    State state = kIdle;
    Clocks::Snapshot filled;    // what had ended when the producer enqueued it
    Clocks::Snapshot released;  // what had ended when the consumer freed it
};

struct QueueState {
    std::string name;
    AscendC::TPosition position = AscendC::TPosition::MAX;
    pipe_t producer = PIPE_S;
    pipe_t consumer = PIPE_S;
    int depth = 0;
    std::vector<QueueBuffer> buffers;
    size_t next = 0;  // the buffer whose turn it is
    std::vector<size_t> fifo;
};

// The vector unit's mask register.
struct MaskState {
    bool counter = false;
    uint64_t low = ~uint64_t{0};
    uint64_t high = ~uint64_t{0};
};

struct Core {
    uint32_t index = 0;
    bool cube = false;
    int64_t block = 0;  // logical AI core
    int64_t subBlock = 0;
    int64_t blockIdx = 0;  // what GetBlockIdx returns
    int64_t perBlock = 1;  // cores of this kind in a logical AI core
    std::array<LocalMemory, kSpaces> memories;
    std::deque<QueueState> queues;
    std::map<std::pair<pipe_t, pipe_t>, EventBank> events;
    std::array<std::deque<Clocks::Snapshot>, kCrossCoreFlags + 1> crossCoreFlags;  // and one for SyncAll
    MaskState mask;
    const char* atomicType = nullptr;
    void* pipe = nullptr;  // the live TPipe
    bool worked = false;
    std::string waitsFor;  // what the core waits for, and whether it has happened
    std::function<bool()> ready;
    CoreCounters counters;

    std::string Name() const
    {
        return Text(
            cube ? "AIC " : "AIV ", blockIdx, " (block ", block, cube ? "" : Text(", sub-block ", subBlock), ")");
    }
};

struct LaunchOptions {
    uint32_t blocks = 1;
    KernelMetaType kernelType = KERNEL_TYPE_AIV_ONLY;
    bool autoSync = true;  // the compiler's --cce-auto-sync, on by default
    uint64_t tilingKey = 0;
};

// Half-finished rounds of a cross-core flag: what each member of the group has set so far.
using CrossCoreGroup = std::map<uint32_t, std::deque<Clocks::Snapshot>>;

struct Device {
    Device(const LaunchOptions& launchOptions, uint32_t coreCount) : options(launchOptions), clocks(coreCount) {}

    LaunchOptions options;
    Clocks clocks;
    std::vector<std::unique_ptr<Core>> cores;
    std::deque<GmBuffer>* gm = nullptr;
    Core* current = nullptr;
    std::function<void()> yield;                                                    // lets the other cores run
    std::map<std::tuple<int, int64_t, bool, int>, CrossCoreGroup> crossCoreGroups;  // mode, block, kind, flag
    uint32_t crossCoreFlagsUsed = 0;
    bool syncAllUsed = false;
};

inline Device*& CurrentDevice()
{
    static Device* device = nullptr;
    return device;
}

inline Device& TheDevice()
{
    if (CurrentDevice() == nullptr) {
        throw ModelError("a kernel API was called outside a launch");
    }
    return *CurrentDevice();
}

inline Core& Me() { return *TheDevice().current; }

inline std::string Where()
{
    return CurrentDevice() == nullptr || CurrentDevice()->current == nullptr ? "host" : Me().Name();
}

inline Thread MyThread(pipe_t pipe) { return Me().index * kPipes + pipe; }

inline bool HasPipe(const Core& core, pipe_t pipe)
{
    switch (pipe) {
        case PIPE_S:
        case PIPE_MTE2:
        case PIPE_MTE3: return true;
        case PIPE_V: return !core.cube;
        case PIPE_M:
        case PIPE_MTE1:
        case PIPE_FIX: return core.cube;
        default: return false;
    }
}

}  // namespace ascendc_model
