// The memories: on-chip buffers of one core, divided into slots, and the GM buffers of a launch. Both record for each
// byte whether it was written; unwritten bytes are 0xFF, which is a NaN in every floating-point type.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "error.h"
#include "hazards.h"
#include "platform.h"

namespace ascendc_model {

constexpr uint8_t kPoison = 0xFF;
constexpr uint64_t kDataBlock = 32;

enum Space : uint8_t { kUb, kL1, kL0a, kL0b, kL0c, kSpaces };
inline constexpr const char* kSpaceNames[kSpaces] = {"UB", "L1", "L0A", "L0B", "L0C"};

// One buffer of InitBuffer. The generation increases whenever tensors on it become invalid.
struct Slot {
    std::string name;
    uint64_t begin = 0;
    uint64_t bytes = 0;
    uint32_t generation = 0;
    const char* lostBy = "";
};

class LocalMemory {
public:
    LocalMemory() = default;
    LocalMemory(Space space, uint64_t capacity) : space_(space), capacity_(capacity) {}

    Slot* Carve(const std::string& name, uint64_t bytes)
    {
        const uint64_t rounded = (bytes + kDataBlock - 1) / kDataBlock * kDataBlock;
        if (data_.size() + rounded > capacity_) {
            Refuse("InitBuffer", name, " needs ", rounded, " bytes of ", kSpaceNames[space_], ", ", data_.size(),
                " are taken and there are ", capacity_);
        }
        slots_.push_back({name, data_.size(), rounded});
        data_.resize(data_.size() + rounded, kPoison);
        written_.resize(data_.size(), 0);
        return &slots_.back();
    }

    void Poison(uint64_t begin, uint64_t bytes)
    {
        std::memset(&data_[begin], kPoison, bytes);
        std::memset(&written_[begin], 0, bytes);
    }

    Space space() const { return space_; }
    uint64_t used() const { return data_.size(); }
    uint8_t* data() { return data_.data(); }
    uint8_t* written() { return written_.data(); }
    AccessLog& log() { return log_; }

private:
    Space space_ = kUb;
    uint64_t capacity_ = 0;
    std::vector<uint8_t> data_;
    std::vector<uint8_t> written_;
    std::deque<Slot> slots_;
    AccessLog log_;
};

enum class GmAccess {
    kInput,   // read only
    kInOut,   // holds the caller's values when the kernel starts
    kOutput,  // poisoned when the kernel starts; a workspace too
};

// A copy of the caller's array between guard zones, so that an address past its end can still be attributed to it.
class GmBuffer {
public:
    enum State : uint8_t { kUnwritten, kInitial, kByKernel };

    GmBuffer(std::string name, void* caller, uint64_t bytes, GmAccess access)
        : name_(std::move(name)), caller_(static_cast<uint8_t*>(caller)), bytes_(bytes), access_(access),
          arena_(bytes + 2 * kGuard + kAlignment, kPoison)
    {
        const auto address = reinterpret_cast<uintptr_t>(arena_.data()) + kGuard;
        data_ = reinterpret_cast<uint8_t*>((address + kAlignment - 1) / kAlignment * kAlignment);
        if (access_ != GmAccess::kOutput) {
            std::memcpy(data_, caller_, bytes_);
        }
        if (access_ != GmAccess::kInput) {
            state_.assign(bytes_, access_ == GmAccess::kInOut ? kInitial : kUnwritten);
        }
    }

    void CopyBack() const
    {
        if (access_ != GmAccess::kInput) {
            std::memcpy(caller_, data_, bytes_);
        }
    }

    bool Holds(const void* address) const
    {
        const auto byte = static_cast<const uint8_t*>(address);
        return byte >= arena_.data() && byte < arena_.data() + arena_.size();
    }

    const std::string& name() const { return name_; }
    uint64_t bytes() const { return bytes_; }
    GmAccess access() const { return access_; }
    bool writable() const { return access_ != GmAccess::kInput; }
    uint8_t* data() const { return data_; }
    std::vector<uint8_t>& state() { return state_; }
    AccessLog& log() { return log_; }

private:
    static constexpr uint64_t kGuard = 64 * 1024;
    static constexpr uint64_t kAlignment = 512;

    std::string name_;
    uint8_t* caller_;
    uint64_t bytes_;
    GmAccess access_;
    std::vector<uint8_t> arena_;
    uint8_t* data_ = nullptr;
    std::vector<uint8_t> state_;  // by byte; empty for an input
    AccessLog log_;
};

}  // namespace ascendc_model
