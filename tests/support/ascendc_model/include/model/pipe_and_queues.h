// TPipe, TQue, TQueBind, TBuf: who owns a buffer when, and the order that the queues give.
#pragma once

#include "flags.h"
#include "structs.h"
#include "tensor.h"

namespace ascendc_model {

// The memory behind a logical position on architecture 2201.
inline Space SpaceOf(AscendC::TPosition position)
{
    using AscendC::TPosition;
    switch (position) {
        case TPosition::VECIN:
        case TPosition::VECOUT:
        case TPosition::VECCALC: return kUb;
        case TPosition::A1:
        case TPosition::B1: return kL1;
        case TPosition::A2: return kL0a;
        case TPosition::B2: return kL0b;
        case TPosition::CO1: return kL0c;
        default: Refuse("InitBuffer", "position ", Name(position), " is not modelled");
    }
}

// The pipe that fills a buffer on the path, and the pipe that empties it.
inline std::pair<pipe_t, pipe_t> PipesOf(AscendC::TPosition source, AscendC::TPosition target)
{
    using AscendC::TPosition;
    if (source == TPosition::GM) {
        return {PIPE_MTE2, target == TPosition::VECIN ? PIPE_V : PIPE_MTE1};
    }
    switch (source) {
        case TPosition::VECIN: return {PIPE_MTE2, PIPE_MTE3};
        case TPosition::VECOUT: return {PIPE_V, PIPE_MTE3};
        case TPosition::A1:
        case TPosition::B1: return {PIPE_MTE1, PIPE_M};
        case TPosition::CO1: return {PIPE_M, PIPE_FIX};
        default: Refuse("TQue", "the path ", Name(source), " -> ", Name(target), " is not modelled");
    }
}

// The documented TQueBind behind each TQue.
constexpr AscendC::TPosition QueueSource(AscendC::TPosition pos)
{
    using AscendC::TPosition;
    switch (pos) {
        case TPosition::VECOUT: return TPosition::VECOUT;
        case TPosition::A2: return TPosition::A1;
        case TPosition::B2: return TPosition::B1;
        case TPosition::CO1: return TPosition::CO1;
        default: return TPosition::GM;
    }
}

constexpr AscendC::TPosition QueueTarget(AscendC::TPosition pos)
{
    using AscendC::TPosition;
    return pos == TPosition::VECOUT ? TPosition::GM : pos == TPosition::CO1 ? TPosition::CO2 : pos;
}

}  // namespace ascendc_model

namespace AscendC {

template <TPosition src, TPosition dst, int32_t depth, auto mask = 0>
class TQueBind {
public:
    template <typename T>
    LocalTensor<T> AllocTensor()
    {
        using namespace ascendc_model;
        QueueState& queue = State("AllocTensor");
        static_assert(depth > 0, "depth 0 (tensors in place) is not modelled");
        // Buffers are handed out in turn: otherwise work on the second would never overlap with work on the first.
        for (size_t i = 0; i < queue.buffers.size(); ++i) {
            const size_t index = (queue.next + i) % queue.buffers.size();
            QueueBuffer& buffer = queue.buffers[index];
            if (buffer.state == QueueBuffer::kIdle) {
                queue.next = index + 1;
                buffer.state = QueueBuffer::kAllocated;
                if (!buffer.released.empty()) {
                    TheDevice().clocks.Learn(MyThread(queue.producer), buffer.released);
                }
                return Tensor<T>(buffer);
            }
        }
        Refuse("AllocTensor", queue.name, ": all ", queue.buffers.size(), " buffers are in use; FreeTensor one first");
    }

    template <typename T>
    bool EnQue(const LocalTensor<T>& tensor)
    {
        using namespace ascendc_model;
        QueueState& queue = State("EnQue");
        const size_t index = Find("EnQue", tensor.Ref());
        QueueBuffer& buffer = queue.buffers[index];
        if (buffer.state != QueueBuffer::kAllocated && buffer.state != QueueBuffer::kDequeued) {
            Refuse("EnQue", queue.name, ": the tensor is already in the queue");
        }
        if (static_cast<int32_t>(queue.fifo.size()) >= depth) {
            Refuse("EnQue", queue.name, ": ", queue.fifo.size() + 1, " tensors in a queue of depth ", depth);
        }
        buffer.state = QueueBuffer::kEnqueued;
        buffer.filled = TheDevice().clocks.Ended(MyThread(queue.producer));
        Revoke(buffer, "EnQue");
        queue.fifo.push_back(index);
        return true;
    }

    template <typename T>
    LocalTensor<T> DeQue()
    {
        using namespace ascendc_model;
        QueueState& queue = State("DeQue");
        if (queue.fifo.empty()) {
            Refuse("DeQue", queue.name, " is empty");
        }
        QueueBuffer& buffer = queue.buffers[queue.fifo.front()];
        queue.fifo.erase(queue.fifo.begin());
        buffer.state = QueueBuffer::kDequeued;
        TheDevice().clocks.Learn(MyThread(queue.consumer), buffer.filled);
        return Tensor<T>(buffer);
    }

    template <typename T>
    void FreeTensor(LocalTensor<T>& tensor)
    {
        using namespace ascendc_model;
        QueueState& queue = State("FreeTensor");
        QueueBuffer& buffer = queue.buffers[Find("FreeTensor", tensor.Ref())];
        buffer.state = QueueBuffer::kIdle;
        buffer.released = TheDevice().clocks.Ended(MyThread(queue.consumer));
        Revoke(buffer, "FreeTensor");
        Me().memories[SpaceOf(queue.position)].Poison(buffer.slot->begin, buffer.slot->bytes);
    }

    ascendc_model::QueueState*& StateForPipe() { return state_; }
    static constexpr TPosition kSource = src;
    static constexpr TPosition kTarget = dst;
    static constexpr int32_t kDepth = depth;

private:
    ascendc_model::QueueState& State(const char* api)
    {
        if (state_ == nullptr) {
            ascendc_model::Refuse(api, "the queue has no buffers: InitBuffer comes first");
        }
        return *state_;
    }

    template <typename T>
    LocalTensor<T> Tensor(const ascendc_model::QueueBuffer& buffer)
    {
        using namespace ascendc_model;
        return LocalTensor<T>(LocalRef{&Me(), buffer.slot, buffer.slot->generation, SpaceOf(state_->position),
            state_->position, buffer.slot->begin, buffer.slot->bytes});
    }

    size_t Find(const char* api, const ascendc_model::LocalRef& tensor)
    {
        using namespace ascendc_model;
        for (size_t i = 0; i < state_->buffers.size(); ++i) {
            const Slot* slot = state_->buffers[i].slot;
            if (slot == tensor.slot && tensor.generation != slot->generation) {
                Refuse(api, slot->name, ": the tensor was given away by ", slot->lostBy);
            }
            if (slot == tensor.slot && tensor.begin == slot->begin) {
                return i;
            }
        }
        Refuse(api, state_->name, ": this queue did not allocate the tensor");
    }

    static void Revoke(ascendc_model::QueueBuffer& buffer, const char* api)
    {
        ++buffer.slot->generation;
        buffer.slot->lostBy = api;
    }

    ascendc_model::QueueState* state_ = nullptr;
};

template <TPosition pos, int32_t depth, auto mask = 0>
class TQue : public TQueBind<ascendc_model::QueueSource(pos), ascendc_model::QueueTarget(pos), depth, mask> {};

template <TPosition pos = TPosition::LCM>
class TBuf {
public:
    template <typename T>
    LocalTensor<T> Get()
    {
        return Get<T>(Bytes() / sizeof(T));
    }

    template <typename T>
    LocalTensor<T> Get(uint32_t len)
    {
        using namespace ascendc_model;
        if (uint64_t{len} * sizeof(T) > Bytes()) {
            Refuse("TBuf.Get", len, " elements of ", sizeof(T), " bytes in a buffer of ", Bytes(), " bytes");
        }
        return LocalTensor<T>(
            LocalRef{&Me(), slot_, slot_->generation, SpaceOf(pos), pos, slot_->begin, uint64_t{len} * sizeof(T)});
    }

    ascendc_model::Slot*& SlotForPipe() { return slot_; }

private:
    uint32_t Bytes() const
    {
        if (slot_ == nullptr) {
            ascendc_model::Refuse("TBuf.Get", "the buffer has no memory: InitBuffer comes first");
        }
        return static_cast<uint32_t>(slot_->bytes);
    }

    ascendc_model::Slot* slot_ = nullptr;
};

class TPipe {
public:
    TPipe()
    {
        if (ascendc_model::Me().pipe != nullptr) {
            ascendc_model::Refuse("TPipe", "a core has one TPipe at a time");
        }
        ascendc_model::Me().pipe = this;
        if (ascendc_model::Me().cube) {
            for (int id = 0; id < 3; ++id) {  // TPipe keeps them for the Matmul classes
                ascendc_model::Me().events[{PIPE_M, PIPE_MTE1}].events[id].ofQueue = true;
            }
        }
    }
    TPipe(const TPipe&) = delete;
    TPipe& operator=(const TPipe&) = delete;
    ~TPipe() { ascendc_model::Me().pipe = nullptr; }

    template <class T>
    bool InitBuffer(T& que, ascendc_model::U8 num, uint32_t len)
    {
        using namespace ascendc_model;
        const TPosition position =
            T::kTarget == TPosition::GM || T::kTarget == TPosition::CO2 ? T::kSource : T::kTarget;
        Core& core = Me();
        core.queues.emplace_back();
        QueueState& queue = core.queues.back();
        queue.position = position;
        queue.name = Text(Name(position), " queue ", core.queues.size() - 1);
        queue.depth = T::kDepth;
        std::tie(queue.producer, queue.consumer) = PipesOf(T::kSource, T::kTarget);
        for (int i = 0; i < num; ++i) {
            QueueBuffer buffer;
            buffer.slot = Carve(position, Text(queue.name, " buffer ", i), len);
            queue.buffers.push_back(buffer);
            // Each buffer takes one event in each direction, and a pair of pipes has eight.
            for (const auto& [from, to] :
                {std::pair(queue.producer, queue.consumer), std::pair(queue.consumer, queue.producer)}) {
                core.events[{from, to}].events[FreeEvent("InitBuffer", from, to)].ofQueue = true;
            }
        }
        que.StateForPipe() = &queue;
        return true;
    }

    template <TPosition bufPos>
    bool InitBuffer(TBuf<bufPos>& buf, uint32_t len)
    {
        buf.SlotForPipe() = Carve(bufPos, ascendc_model::Text(ascendc_model::Name(bufPos), " TBuf ", tbufs_++), len);
        return true;
    }

    template <HardEvent evt>
    TEventID AllocEventID()
    {
        using namespace ascendc_model;
        const EventInfo& info = InfoOf(evt);
        EventBank& bank = BankOf("AllocEventID", info);
        const int id = FreeEvent("AllocEventID", info.source, info.target);
        bank.events[id].taken = true;
        return static_cast<TEventID>(id);
    }

    template <HardEvent evt>
    void ReleaseEventID(TEventID id)
    {
        using namespace ascendc_model;
        auto& event = EventOf("ReleaseEventID", InfoOf(evt), id);
        if (!event.taken) {
            Refuse("ReleaseEventID", "event id ", int{id}, " of ", InfoOf(evt).name, " was not allocated");
        }
        event.taken = false;
    }

    template <HardEvent evt>
    TEventID FetchEventID()
    {
        return FetchEventID(evt);
    }

    TEventID FetchEventID(HardEvent evt)
    {
        using namespace ascendc_model;
        const EventInfo& info = InfoOf(evt);
        BankOf("FetchEventID", info);
        return static_cast<TEventID>(FreeEvent("FetchEventID", info.source, info.target));
    }

private:
    ascendc_model::Slot* Carve(TPosition position, const std::string& name, uint32_t len)
    {
        using namespace ascendc_model;
        if (++buffers_ > 64) {
            Refuse("InitBuffer", "a kernel has at most 64 buffers");
        }
        LocalMemory& memory = Me().memories[SpaceOf(position)];
        Slot* slot = memory.Carve(name, len);
        Me().counters.peak[kSpaceNames[memory.space()]] = memory.used();
        return slot;
    }

    int buffers_ = 0;
    int tbufs_ = 0;
};

inline TPipe* GetTPipePtr()
{
    if (ascendc_model::Me().pipe == nullptr) {
        ascendc_model::Refuse("GetTPipePtr", "no TPipe is alive on this core");
    }
    return static_cast<TPipe*>(ascendc_model::Me().pipe);
}

}  // namespace AscendC
