// LocalTensor and GlobalTensor: typed views, checked when they are used.
#pragma once

#include "half.h"
#include "instruction.h"
#include "kernel_macros.h"

namespace AscendC {

template <typename T>
class LocalTensor {
public:
    using PrimType = T;

    LocalTensor() = default;
    explicit LocalTensor(const ascendc_model::LocalRef& ref) : ref_(ref) {}

    LocalTensor operator[](const uint32_t offset) const
    {
        if (offset > GetSize()) {
            ascendc_model::Refuse("LocalTensor", "offset ", offset, " of a tensor with ", GetSize(), " elements");
        }
        LocalTensor out = *this;
        out.ref_.begin += offset * sizeof(T);
        out.ref_.bytes -= offset * sizeof(T);
        return out;
    }

    T GetValue(const uint32_t index) const
    {
        ascendc_model::Instruction scalar("LocalTensor.GetValue", PIPE_S);
        scalar.CheckSpace(ref_, "the tensor", {ascendc_model::kUb});
        T value;
        std::memcpy(&value, scalar.Read(ref_, "the tensor", At(index), At(index) + sizeof(T)), sizeof(T));
        return value;
    }

    template <typename T1>
    void SetValue(const uint32_t index, const T1 value) const
    {
        ascendc_model::Instruction scalar("LocalTensor.SetValue", PIPE_S);
        scalar.CheckSpace(ref_, "the tensor", {ascendc_model::kUb});
        const T converted = static_cast<T>(value);
        std::memcpy(scalar.Write(ref_, "the tensor", At(index), At(index) + sizeof(T)), &converted, sizeof(T));
    }

    T operator()(const uint32_t index) const { return GetValue(index); }

    template <typename CAST_T>
    LocalTensor<CAST_T> ReinterpretCast() const
    {
        return LocalTensor<CAST_T>(ref_);
    }

    uint32_t GetSize() const { return static_cast<uint32_t>(ref_.bytes / sizeof(T)); }
    uint32_t GetLength() const { return static_cast<uint32_t>(ref_.bytes); }
    void SetSize(const uint32_t size) { ref_.bytes = size * sizeof(T); }
    int32_t GetPosition() const { return static_cast<int32_t>(ref_.position); }

    const ascendc_model::LocalRef& Ref() const { return ref_; }

private:
    uint64_t At(uint32_t index) const { return ref_.begin + uint64_t{index} * sizeof(T); }

    ascendc_model::LocalRef ref_;
};

template <typename T>
class GlobalTensor {
public:
    using PrimType = T;

    void SetGlobalBuffer(__gm__ T* buffer) { SetGlobalBuffer(buffer, 0); }

    void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize)
    {
        ref_.buffer = ascendc_model::FindGm(buffer);
        size_ = bufferSize;
        if (ref_.buffer == nullptr) {
            if (buffer != nullptr) {  // an optional argument may be null, as long as it is not read
                ascendc_model::Refuse("SetGlobalBuffer", "the address is in no GM buffer of the launch");
            }
            return;
        }
        ref_.offset = reinterpret_cast<uint8_t*>(buffer) - ref_.buffer->data();
        if (ref_.offset % static_cast<int64_t>(sizeof(T)) != 0) {
            ascendc_model::Refuse("SetGlobalBuffer", "byte ", ref_.offset, " of GM buffer ", ref_.buffer->name(),
                " is not aligned to ", sizeof(T), " bytes");
        }
        const int64_t end = ref_.offset + static_cast<int64_t>(bufferSize * sizeof(T));
        if (bufferSize != 0 && (ref_.offset < 0 || end > static_cast<int64_t>(ref_.buffer->bytes()))) {
            ascendc_model::Refuse("SetGlobalBuffer", "bytes [", ref_.offset, ", ", end, ") of GM buffer ",
                ref_.buffer->name(), ", which has ", ref_.buffer->bytes());
        }
    }

    GlobalTensor operator[](const uint64_t offset) const
    {
        GlobalTensor out = *this;
        out.ref_.offset += static_cast<int64_t>(offset * sizeof(T));
        return out;
    }

    // The scalar unit reads through a data cache, which does not see what kernels write.
    T GetValue(const uint64_t offset) const
    {
        ascendc_model::Instruction scalar("GlobalTensor.GetValue", PIPE_S);
        const int64_t at = ref_.offset + static_cast<int64_t>(offset * sizeof(T));
        T value;
        std::memcpy(&value, scalar.ReadGm(ref_, "the tensor", at, sizeof(T)), sizeof(T));
        if (ref_.buffer->writable() && ref_.buffer->state()[at] == ascendc_model::GmBuffer::kByKernel) {
            ascendc_model::Refuse("GlobalTensor.GetValue", "byte ", at, " of GM buffer ", ref_.buffer->name(),
                " was written in this launch; the data cache may hold an older value (DataCacheCleanAndInvalid is not "
                "modelled)");
        }
        return value;
    }

    T operator()(const uint64_t offset) const { return GetValue(offset); }

    uint64_t GetSize() const { return size_; }
    const __gm__ T* GetPhyAddr() const { return GetPhyAddr(0); }
    __gm__ T* GetPhyAddr(const uint64_t offset) const
    {
        return reinterpret_cast<T*>(ref_.buffer->data() + ref_.offset) + offset;
    }

    const ascendc_model::GmRef& Ref() const { return ref_; }

private:
    ascendc_model::GmRef ref_;
    uint64_t size_ = 0;
};

}  // namespace AscendC
