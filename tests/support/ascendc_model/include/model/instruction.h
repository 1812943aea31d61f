// One instruction on one pipe. All that an API reads and writes passes through here, so bounds, lifetime, unwritten
// bytes and hazards are checked in this one place.
#pragma once

#include "core.h"

namespace ascendc_model {

// The memory of a LocalTensor.
struct LocalRef {
    Core* core = nullptr;
    Slot* slot = nullptr;
    uint32_t generation = 0;
    Space space = kUb;
    AscendC::TPosition position = AscendC::TPosition::MAX;
    uint64_t begin = 0;  // address in its memory
    uint64_t bytes = 0;  // size of the tensor
};

// Where a GlobalTensor points.
struct GmRef {
    GmBuffer* buffer = nullptr;
    int64_t offset = 0;
};

class Instruction {
public:
    // repeats: of the vector unit, or products of two fractals.
    Instruction(const char* api, pipe_t pipe, uint64_t repeats = 0) : api_(api), pipe_(pipe)
    {
        if (!HasPipe(Me(), pipe)) {
            Refuse(api, "runs on PIPE_", kPipeNames[pipe], ", which this kind of core does not have");
        }
        thread_ = MyThread(pipe);
        number_ = TheDevice().clocks.Issue(thread_);
        ++Me().counters.instructions[pipe];
        Me().counters.repeats += repeats;
        Me().worked = Me().worked || pipe != PIPE_S;
    }

    const char* api() const { return api_; }

    // The start address of a tensor must be a multiple of `alignment`.
    void CheckAligned(const LocalRef& tensor, const char* operand, uint64_t alignment) const
    {
        CheckAlive(tensor, operand);
        if (tensor.begin % alignment != 0) {
            Refuse(api_, operand, " starts at address ", tensor.begin, " of ", kSpaceNames[tensor.space],
                ", which is not a multiple of ", alignment, " bytes");
        }
    }

    void CheckSpace(const LocalRef& tensor, const char* operand, std::initializer_list<Space> allowed) const
    {
        CheckAlive(tensor, operand);
        for (Space space : allowed) {
            if (space == tensor.space) {
                return;
            }
        }
        Refuse(api_, operand, " is in ", kSpaceNames[tensor.space], " (", Name(tensor.position),
            "), which this path does not support");
    }

    // Bytes [begin, end) of the memory that holds the tensor. Padding that the cube ignores is read with
    // `mayBeUnwritten`.
    const uint8_t* Read(
        const LocalRef& tensor, const char* operand, uint64_t begin, uint64_t end, bool mayBeUnwritten = false)
    {
        LocalMemory& memory = Touch(tensor, operand, begin, end, Access::kRead);
        if (!mayBeUnwritten) {
            const void* hole = std::memchr(memory.written() + begin, 0, end - begin);
            if (hole != nullptr) {
                const uint64_t at = static_cast<const uint8_t*>(hole) - memory.written();
                Refuse(api_, operand, " reads byte ", at - tensor.slot->begin, " of ", tensor.slot->name,
                    ", which was never written");
            }
        }
        return memory.data() + begin;
    }

    uint8_t* Write(const LocalRef& tensor, const char* operand, uint64_t begin, uint64_t end)
    {
        LocalMemory& memory = Touch(tensor, operand, begin, end, Access::kWrite);
        std::memset(memory.written() + begin, 1, end - begin);
        return memory.data() + begin;
    }

    // Which of the bytes were written, to be copied along with them.
    uint8_t* Written(const LocalRef& tensor, uint64_t begin)
    {
        return tensor.core->memories[tensor.space].written() + begin;
    }

    const uint8_t* ReadGm(const GmRef& tensor, const char* operand, int64_t offset, uint64_t bytes)
    {
        GmBuffer& buffer = TouchGm(tensor, operand, offset, bytes, Access::kRead);
        if (buffer.writable()) {
            const void* hole = std::memchr(buffer.state().data() + offset, GmBuffer::kUnwritten, bytes);
            if (hole != nullptr) {
                Refuse(api_, operand, " reads byte ", static_cast<const uint8_t*>(hole) - buffer.state().data(),
                    " of GM buffer ", buffer.name(), ", which was never written");
            }
        }
        Me().counters.gm[buffer.name()].read += bytes;
        return buffer.data() + offset;
    }

    uint8_t* WriteGm(const GmRef& tensor, const char* operand, int64_t offset, uint64_t bytes, bool atomic)
    {
        GmBuffer& buffer = TouchGm(tensor, operand, offset, bytes, atomic ? Access::kAtomic : Access::kWrite);
        const void* hole = std::memchr(buffer.state().data() + offset, GmBuffer::kUnwritten, bytes);
        if (atomic && hole != nullptr) {
            Refuse(api_, operand, " adds to byte ", static_cast<const uint8_t*>(hole) - buffer.state().data(),
                " of GM buffer ", buffer.name(), ", which was never written: atomic addition does not clear GM");
        }
        std::memset(buffer.state().data() + offset, GmBuffer::kByKernel, bytes);
        Me().counters.gm[buffer.name()].written += bytes;
        return buffer.data() + offset;
    }

private:
    void CheckAlive(const LocalRef& tensor, const char* operand) const
    {
        if (tensor.slot == nullptr) {
            Refuse(api_, operand, " is a tensor without memory");
        }
        if (tensor.core != &Me()) {
            Refuse(api_, operand, " belongs to another core, ", tensor.core->Name());
        }
        if (tensor.generation != tensor.slot->generation) {
            Refuse(api_, operand, " is used after ", tensor.slot->lostBy, ": ", tensor.slot->name);
        }
        if ((tensor.space == kUb) == tensor.core->cube) {
            Refuse(api_, operand, " is in ", kSpaceNames[tensor.space], ", which this kind of core does not have");
        }
    }

    LocalMemory& Touch(const LocalRef& tensor, const char* operand, uint64_t begin, uint64_t end, Access access)
    {
        CheckAlive(tensor, operand);
        const Slot& slot = *tensor.slot;
        if (begin < slot.begin || end > slot.begin + slot.bytes) {
            Refuse(api_, operand, access == Access::kRead ? " reads" : " writes", " bytes [",
                static_cast<int64_t>(begin - slot.begin), ", ", static_cast<int64_t>(end - slot.begin), ") of ",
                slot.name, ", which has ", slot.bytes);
        }
        LocalMemory& memory = tensor.core->memories[tensor.space];
        const auto ordered = [this](const Record& old) { return Ordered(old); };
        Record conflict;
        if (!memory.log().Add({begin, end, thread_, number_, access, api_}, ordered, conflict)) {
            RefuseHazard(operand, conflict, access,
                Text(kSpaceNames[tensor.space], " bytes [", conflict.begin - slot.begin, ", ",
                    conflict.end - slot.begin, ") of ", slot.name));
        }
        return memory;
    }

    GmBuffer& TouchGm(const GmRef& tensor, const char* operand, int64_t offset, uint64_t bytes, Access access)
    {
        if (tensor.buffer == nullptr) {
            Refuse(api_, operand, " is a GlobalTensor without a buffer");
        }
        GmBuffer& buffer = *tensor.buffer;
        if (offset < 0 || offset + bytes > buffer.bytes()) {
            Refuse(api_, operand, access == Access::kRead ? " reads" : " writes", " bytes [", offset, ", ",
                offset + static_cast<int64_t>(bytes), ") of GM buffer ", buffer.name(), ", which has ", buffer.bytes());
        }
        if (!buffer.writable()) {
            if (access != Access::kRead) {
                Refuse(api_, operand, " writes to GM buffer ", buffer.name(), ", which is an input");
            }
            return buffer;
        }
        const auto begin = static_cast<uint64_t>(offset);
        const auto ordered = [this](const Record& old) { return Ordered(old); };
        Record conflict;
        if (!buffer.log().Add({begin, begin + bytes, thread_, number_, access, api_}, ordered, conflict)) {
            RefuseHazard(operand, conflict, access,
                Text("bytes [", conflict.begin, ", ", conflict.end, ") of GM buffer ", buffer.name()));
        }
        return buffer;
    }

    // Whether an earlier access is known to have ended.
    bool Ordered(const Record& old) const
    {
        const Device& device = TheDevice();
        const bool sameCore = old.thread / kPipes == thread_ / kPipes;
        if (old.thread == thread_) {
            // A pipe starts its instructions in order, so an earlier one has already read its sources.
            if (pipe_ == PIPE_S || old.access == Access::kRead || (pipe_ == PIPE_V && device.options.autoSync)) {
                return true;
            }
        } else if (sameCore && !Me().cube && device.options.autoSync &&
            (pipe_ == PIPE_S || PipeOf(old.thread) == PIPE_S)) {
            return true;
        }
        return device.clocks.Knows(thread_, old.thread, old.number);
    }

    [[noreturn]] void RefuseHazard(const char* operand, const Record& old, Access access, const std::string& bytes)
    {
        const char* kind = access == Access::kRead ? "RAW" : old.access == Access::kRead ? "WAR" : "WAW";
        const std::string deed = Text(kind, " hazard: ", operand, " (PIPE_", kPipeNames[pipe_], ") ",
            access == Access::kRead ? "reads " : "writes ", bytes, ", which ");
        const char* done = old.access == Access::kRead ? " reads" : " writes";
        const std::string other = kPipeNames[PipeOf(old.thread)];
        if (old.thread / kPipes != thread_ / kPipes) {
            Refuse(api_, deed, old.api, " of ", TheDevice().cores[old.thread / kPipes]->Name(), done,
                ", without CrossCoreSetFlag/CrossCoreWaitFlag or SyncAll between them");
        }
        if (old.thread == thread_) {
            Refuse(api_, deed, old.api, done, " on the same pipe, without PipeBarrier<PIPE_", other, "> between them");
        }
        Refuse(api_, deed, old.api, " (PIPE_", other, ")", done, ", without SetFlag/WaitFlag<HardEvent::", other, "_",
            kPipeNames[pipe_], ">, EnQue/DeQue or PipeBarrier<PIPE_ALL> between them");
    }

    const char* api_;
    pipe_t pipe_;
    Thread thread_ = 0;
    uint32_t number_ = 0;
};

}  // namespace ascendc_model
