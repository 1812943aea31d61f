// The vector unit: which lanes of which repeats take part, where their elements are, and what may overlap.
#pragma once

#include "structs.h"
#include "tensor.h"

namespace AscendC {

enum class MaskMode : uint8_t { NORMAL = 0, COUNTER };

constexpr uint64_t MASK_PLACEHOLDER = 0;

inline void SetMaskCount() { ascendc_model::Me().mask.counter = true; }
inline void SetMaskNorm() { ascendc_model::Me().mask.counter = false; }
inline void ResetMask() { ascendc_model::Me().mask.low = ascendc_model::Me().mask.high = ~uint64_t{0}; }

}  // namespace AscendC

namespace ascendc_model {

constexpr uint64_t kRepeatBytes = 256;

// The lowest `lanes` bits of a mask register.
inline MaskState FirstLanes(bool counter, uint64_t lanes)
{
    const auto ones = [](uint64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
    return {counter, ones(lanes), lanes > 64 ? ones(lanes - 64) : 0};
}

struct Lanes {
    uint64_t perRepeat = 0;
    uint64_t repeats = 0;
    uint64_t total = ~uint64_t{0};  // counter mode: how many in all
    uint64_t low = ~uint64_t{0};
    uint64_t high = ~uint64_t{0};

    bool Active(uint64_t repeat, uint64_t lane) const
    {
        const uint64_t bit = lane < 64 ? low >> lane : high >> (lane - 64);
        return (bit & 1) != 0 && repeat * perRepeat + lane < total;
    }
    bool Empty() const { return repeats == 0 || (low == 0 && (high == 0 || perRepeat <= 64)); }

    static Lanes Counter(uint64_t perRepeat, uint64_t total)
    {
        return {perRepeat, (total + perRepeat - 1) / perRepeat, total};
    }
};

// The first `count` elements. The API sets counter mode for itself and leaves normal mode and a full mask behind.
template <bool isSetMask = true>
Lanes CountLanes(const char* api, int64_t count, uint64_t perRepeat)
{
    MaskState& mask = Me().mask;
    if constexpr (!isSetMask) {
        if (!mask.counter) {
            Refuse(api, "the count form with isSetMask = false needs SetMaskCount");
        }
        return Lanes::Counter(perRepeat, mask.low);
    }
    if (count < 0) {
        Refuse(api, "count is ", count);
    }
    mask = MaskState{};
    return Lanes::Counter(perRepeat, static_cast<uint64_t>(count));
}

// By the mask register: counter mode ignores the repeat count.
inline Lanes RegisterLanes(uint64_t repeats, uint64_t perRepeat)
{
    const MaskState& mask = Me().mask;
    return mask.counter ? Lanes::Counter(perRepeat, mask.low)
                        : Lanes{perRepeat, repeats, ~uint64_t{0}, mask.low, mask.high};
}

template <bool isSetMask>
Lanes MaskLanes(const char* api, uint64_t mask, uint64_t repeats, uint64_t perRepeat)
{
    if constexpr (isSetMask) {
        if (Me().mask.counter) {
            Me().mask.low = mask;
        } else {
            CheckRange(api, "mask", mask, 0, perRepeat);
            Me().mask = FirstLanes(false, mask);
        }
    }
    return RegisterLanes(repeats, perRepeat);
}

template <bool isSetMask>
Lanes MaskLanes(const char*, const uint64_t mask[], uint64_t repeats, uint64_t perRepeat)
{
    if constexpr (isSetMask) {
        Me().mask.low = mask[0];
        Me().mask.high = perRepeat > 64 ? mask[1] : 0;
    }
    return RegisterLanes(repeats, perRepeat);
}

template <class T>
struct Operand {
    const char* name;
    LocalRef ref;
    uint64_t blockStride = 1;
    uint64_t repeatStride = 8;
    bool mayFollowDst = false;  // as a source, it may be the result of an earlier repeat

    Operand(const char* operandName, const AscendC::LocalTensor<T>& tensor, uint64_t block, uint64_t repeat)
        : name(operandName), ref(tensor.Ref()), blockStride(block), repeatStride(repeat)
    {}

    // The count form: all elements in one row.
    Operand(const char* operandName, const AscendC::LocalTensor<T>& tensor, uint64_t perRepeat)
        : Operand(operandName, tensor, 1, perRepeat * sizeof(T) / kDataBlock)
    {}

    uint64_t At(uint64_t repeat, uint64_t lane) const
    {
        const uint64_t byte = lane * sizeof(T);
        return ref.begin + kDataBlock * (repeat * repeatStride + byte / kDataBlock * blockStride) + byte % kDataBlock;
    }
};

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;

inline void Extend(Ranges& ranges, uint64_t begin, uint64_t end)
{
    if (!ranges.empty() && ranges.back().second == begin) {
        ranges.back().second = end;
    } else if (ranges.empty() || ranges.back() != std::pair(begin, end)) {
        ranges.emplace_back(begin, end);
    }
}

template <class T>
Ranges RangesOf(const Lanes& lanes, const Operand<T>& operand)
{
    Ranges ranges;
    for (uint64_t repeat = 0; repeat < lanes.repeats; ++repeat) {
        for (uint64_t lane = 0; lane < lanes.perRepeat; ++lane) {
            if (lanes.Active(repeat, lane)) {
                const uint64_t at = operand.At(repeat, lane);
                Extend(ranges, at, at + sizeof(T));
            }
        }
    }
    return ranges;
}

inline void ReadRanges(Instruction& vector, const LocalRef& ref, const char* name, const Ranges& ranges)
{
    for (const auto& [begin, end] : ranges) {
        vector.Read(ref, name, begin, end);
    }
}

inline void WriteRanges(Instruction& vector, const LocalRef& ref, const char* name, const Ranges& ranges)
{
    for (const auto& [begin, end] : ranges) {
        vector.Write(ref, name, begin, end);
    }
}

// The data blocks that a repeat touches, in order.
template <class T>
std::vector<uint64_t> BlocksOf(const Lanes& lanes, const Operand<T>& operand, uint64_t repeat)
{
    std::vector<uint64_t> blocks;
    for (uint64_t lane = 0; lane < lanes.perRepeat; ++lane) {
        const uint64_t block = operand.At(repeat, lane) / kDataBlock;
        if (lanes.Active(repeat, lane) && (blocks.empty() || blocks.back() != block)) {
            blocks.push_back(block);
        }
    }
    return blocks;
}

// Within a repeat, source and destination are the same or apart; across repeats, no destination of an earlier repeat
// is a source of a later one, unless it may be.
template <class D, class S>
void CheckOverlap(const char* api, const Lanes& lanes, const Operand<D>& dst, const Operand<S>& src)
{
    if (dst.ref.slot != src.ref.slot) {
        return;
    }
    std::map<uint64_t, uint64_t> writtenIn;  // block -> repeat
    for (uint64_t repeat = 0; repeat < lanes.repeats; ++repeat) {
        const auto from = BlocksOf(lanes, src, repeat);
        const auto to = BlocksOf(lanes, dst, repeat);
        const bool same = from == to && sizeof(D) == sizeof(S);
        for (uint64_t block : from) {
            if (!same && std::find(to.begin(), to.end(), block) != to.end()) {
                Refuse(api, src.name, " and dst overlap in part in repeat ", repeat, "; they may be the same or apart");
            }
            if (!src.mayFollowDst && writtenIn.count(block) != 0) {
                Refuse(api, src.name, " of repeat ", repeat, " is dst of repeat ", writtenIn[block],
                    ", which need not have ended");
            }
        }
        for (uint64_t block : to) {
            writtenIn.emplace(block, repeat);
        }
    }
}

template <class T>
void CheckOperand(const Instruction& vector, const Operand<T>& operand)
{
    vector.CheckSpace(operand.ref, operand.name, {kUb});
    vector.CheckAligned(operand.ref, operand.name, kDataBlock);
}

template <class T>
T Load(const LocalRef& ref, uint64_t at)
{
    T value;
    std::memcpy(&value, ref.core->memories[ref.space].data() + at, sizeof(T));
    return value;
}

template <class T>
void Store(const LocalRef& ref, uint64_t at, const T& value)
{
    std::memcpy(ref.core->memories[ref.space].data() + at, &value, sizeof(T));
}

// dst = f(sources...), lane by lane. A repeat reads all its sources before it writes.
template <class D, class F, class... S>
void Elementwise(const char* api, const Lanes& lanes, const Operand<D>& dst, const F& f, const Operand<S>&... sources)
{
    if (lanes.Empty()) {
        return;
    }
    Instruction vector(api, PIPE_V, lanes.repeats);
    CheckOperand(vector, dst);
    (CheckOperand(vector, sources), ...);
    if (dst.blockStride == 0) {
        Refuse(api, "dstBlkStride is 0, which is undefined");
    }
    (CheckOverlap(api, lanes, dst, sources), ...);
    (ReadRanges(vector, sources.ref, sources.name, RangesOf(lanes, sources)), ...);
    WriteRanges(vector, dst.ref, dst.name, RangesOf(lanes, dst));
    std::vector<D> results(lanes.perRepeat);
    for (uint64_t repeat = 0; repeat < lanes.repeats; ++repeat) {
        for (uint64_t lane = 0; lane < lanes.perRepeat; ++lane) {
            if (lanes.Active(repeat, lane)) {
                results[lane] = f(Load<S>(sources.ref, sources.At(repeat, lane))...);
            }
        }
        for (uint64_t lane = 0; lane < lanes.perRepeat; ++lane) {
            if (lanes.Active(repeat, lane)) {
                Store(dst.ref, dst.At(repeat, lane), results[lane]);
            }
        }
    }
}

template <class... Supported, class T>
void CheckType(const char* api, const char* operand, const T*)
{
    if (!kIsOneOf<T, Supported...>) {
        Refuse(api, operand, " is of type ", kTypeName<T>, ", which this instruction does not support");
    }
}

}  // namespace ascendc_model

namespace AscendC {

template <typename T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(const uint64_t maskHigh, const uint64_t maskLow)
{
    ascendc_model::Me().mask.low = maskLow;
    ascendc_model::Me().mask.high = maskHigh;
}

template <typename T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(int32_t len)
{
    using namespace ascendc_model;
    if constexpr (mode == MaskMode::COUNTER) {
        CheckRange("SetVectorMask", "len", len, 0, INT32_MAX);
        Me().mask.low = static_cast<uint64_t>(len);
    } else {
        CheckRange("SetVectorMask", "len", len, 0, kRepeatBytes / sizeof(T));
        Me().mask = FirstLanes(Me().mask.counter, static_cast<uint64_t>(len));
    }
}

}  // namespace AscendC
