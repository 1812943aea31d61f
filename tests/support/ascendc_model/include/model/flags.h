// Order between the pipes of a core: SetFlag/WaitFlag, event ids, PipeBarrier.
#pragma once

#include "instruction.h"

// Built-in names of the device compiler.
enum event_t { EVENT_ID0 = 0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

// Source pipe, target pipe, in the documented order.
// clang-format off
#define ASCENDC_MODEL_EVENTS(EVENT)                                                                                   \
    EVENT(MTE2, MTE1) EVENT(MTE1, MTE2) EVENT(MTE1, M) EVENT(M, MTE1) EVENT(MTE2, V) EVENT(V, MTE2) EVENT(MTE3, V)    \
    EVENT(V, MTE3) EVENT(M, V) EVENT(V, M) EVENT(V, V) EVENT(MTE3, MTE1) EVENT(MTE1, MTE3) EVENT(MTE1, V)             \
    EVENT(MTE2, M) EVENT(M, MTE2) EVENT(V, MTE1) EVENT(M, FIX) EVENT(FIX, M) EVENT(MTE3, MTE2) EVENT(MTE2, MTE3)      \
    EVENT(S, V) EVENT(V, S) EVENT(S, MTE2) EVENT(MTE2, S) EVENT(S, MTE3) EVENT(MTE3, S) EVENT(MTE2, FIX)              \
    EVENT(FIX, MTE2) EVENT(FIX, S) EVENT(M, S) EVENT(FIX, MTE3) EVENT(MTE1, FIX) EVENT(FIX, MTE1)
// clang-format on

namespace AscendC {

using TEventID = int8_t;

enum class HardEvent : uint8_t {
#define ASCENDC_MODEL_EVENT(source, target) source##_##target,
    ASCENDC_MODEL_EVENTS(ASCENDC_MODEL_EVENT) MAX
#undef ASCENDC_MODEL_EVENT
};

}  // namespace AscendC

namespace ascendc_model {

struct EventInfo {
    const char* name;
    pipe_t source;
    pipe_t target;
};

inline const EventInfo& InfoOf(AscendC::HardEvent event)
{
#define ASCENDC_MODEL_EVENT(source, target) {#source "_" #target, PIPE_##source, PIPE_##target},
    static const EventInfo infos[] = {ASCENDC_MODEL_EVENTS(ASCENDC_MODEL_EVENT)};
#undef ASCENDC_MODEL_EVENT
    return infos[static_cast<int>(event)];
}

// The pairs of pipes that the documentation lists for each kind of core of architecture 2201.
inline bool IsLegalPair(bool cube, pipe_t source, pipe_t target)
{
    if (source == target) {
        return false;
    }
    const auto isOneOf = [](pipe_t pipe, std::initializer_list<pipe_t> pipes) {
        return std::find(pipes.begin(), pipes.end(), pipe) != pipes.end();
    };
    if (!cube) {
        return isOneOf(source, {PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3}) &&
            isOneOf(target, {PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3});
    }
    switch (source) {
        case PIPE_M: return isOneOf(target, {PIPE_MTE1, PIPE_MTE2, PIPE_FIX});
        case PIPE_MTE1: return isOneOf(target, {PIPE_M, PIPE_MTE2, PIPE_MTE3, PIPE_FIX});
        case PIPE_MTE2: return isOneOf(target, {PIPE_M, PIPE_MTE1, PIPE_MTE3});
        case PIPE_MTE3: return isOneOf(target, {PIPE_MTE1, PIPE_MTE2});
        case PIPE_FIX: return isOneOf(target, {PIPE_M, PIPE_MTE1});
        default: return false;
    }
}

inline EventBank& BankOf(const char* api, const EventInfo& info)
{
    if (!IsLegalPair(Me().cube, info.source, info.target)) {
        Refuse(api, "HardEvent::", info.name, " is not a documented event of this kind of core");
    }
    return Me().events[{info.source, info.target}];
}

// A flag of the bank that belongs to neither a queue, TPipe nor AllocEventID.
inline int FreeEvent(const char* api, pipe_t source, pipe_t target)
{
    EventBank& bank = Me().events[{source, target}];
    for (int id = 0; id < kEventIds; ++id) {
        if (!bank.events[id].taken && !bank.events[id].ofQueue) {
            return id;
        }
    }
    Refuse(api, "all ", kEventIds, " event ids of ", kPipeNames[source], "_", kPipeNames[target], " are taken");
}

inline EventBank::Event& EventOf(const char* api, const EventInfo& info, int32_t eventID)
{
    CheckRange(api, "eventID", eventID, 0, kEventIds - 1);
    EventBank::Event& event = BankOf(api, info).events[eventID];
    if (event.ofQueue) {
        Refuse(api, "event id ", eventID, " of ", info.name,
            " belongs to a queue or to TPipe; take one from "
            "AllocEventID or FetchEventID");
    }
    return event;
}

}  // namespace ascendc_model

namespace AscendC {

template <HardEvent event>
void SetFlag(int32_t eventID)
{
    using namespace ascendc_model;
    const EventInfo& info = InfoOf(event);
    auto& flag = EventOf("SetFlag", info, eventID);
    if (flag.set) {
        Refuse("SetFlag", info.name, " ", eventID, " is already set; two SetFlags without a WaitFlag are undefined");
    }
    flag.set = TheDevice().clocks.Ended(MyThread(info.source));
}

template <HardEvent event>
void WaitFlag(int32_t eventID)
{
    using namespace ascendc_model;
    const EventInfo& info = InfoOf(event);
    auto& flag = EventOf("WaitFlag", info, eventID);
    if (!flag.set) {
        Refuse("WaitFlag", info.name, " ", eventID, " was never set: PIPE_", kPipeNames[info.target],
            " would wait for ever");
    }
    TheDevice().clocks.Learn(MyThread(info.target), *flag.set);
    flag.set.reset();
}

template <pipe_t pipe>
void PipeBarrier()
{
    using namespace ascendc_model;
    static_assert(pipe != PIPE_S, "PipeBarrier does not support PIPE_S: the hardware orders scalar instructions");
    Clocks& clocks = TheDevice().clocks;
    if constexpr (pipe == PIPE_ALL) {
        Clocks::Snapshot all;
        for (uint32_t p = 0; p < kPipes; ++p) {
            Clocks::Merge(all, clocks.Ended(MyThread(static_cast<pipe_t>(p))));
        }
        for (uint32_t p = 0; p < kPipes; ++p) {
            clocks.Learn(MyThread(static_cast<pipe_t>(p)), all);
        }
    } else {
        if (!HasPipe(Me(), pipe)) {
            Refuse("PipeBarrier", "this kind of core has no PIPE_", kPipeNames[pipe]);
        }
        clocks.WaitForItself(MyThread(pipe));
    }
}

}  // namespace AscendC
