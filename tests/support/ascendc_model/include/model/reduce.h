// Sums within repeats, data blocks and pairs, by the documented binary tree of neighbours; each addition is rounded.
#pragma once

#include "vector.h"

namespace ascendc_model {

template <class T>
T TreeSum(std::vector<T> values)
{
    while (values.size() > 1) {
        for (size_t i = 0; 2 * i < values.size(); ++i) {
            values[i] =
                2 * i + 1 < values.size() ? Rounded<T>(Widen(values[2 * i]) + Widen(values[2 * i + 1])) : values[2 * i];
        }
        values.resize((values.size() + 1) / 2);
    }
    return values[0];
}

// The active lanes [first, first + count) of a repeat; masked lanes count as zero.
template <class T>
std::vector<T> MaskedValues(const Lanes& lanes, const Operand<T>& src, uint64_t repeat, uint64_t first, uint64_t count)
{
    std::vector<T> values(count, T(0.0f));
    for (uint64_t i = 0; i < count; ++i) {
        if (lanes.Active(repeat, first + i)) {
            values[i] = Load<T>(src.ref, src.At(repeat, first + i));
        }
    }
    return values;
}

inline bool AnyActive(const Lanes& lanes, uint64_t repeat, uint64_t first, uint64_t count)
{
    for (uint64_t i = first; i < first + count; ++i) {
        if (lanes.Active(repeat, i)) {
            return true;
        }
    }
    return false;
}

// dst is smaller than src, so they could overlap in part only, which the general rule forbids.
inline void CheckApart(
    const char* api, const LocalRef& dst, uint64_t begin, uint64_t end, const LocalRef& src, const Ranges& sources)
{
    for (const auto& [low, high] : sources) {
        if (dst.slot == src.slot && begin < high && low < end) {
            Refuse(api, "dst overlaps src in part");
        }
    }
}

// Each group of `group` lanes becomes one element of dst; dst advances by dstRepeatBytes for each repeat.
template <class T>
void ReduceGroups(const char* api, const Lanes& lanes, uint64_t group, uint64_t dstAlignment, uint64_t dstRepeatBytes,
    const AscendC::LocalTensor<T>& dst, const Operand<T>& src)
{
    CheckType<half, float>(api, "src", static_cast<const T*>(nullptr));
    if (lanes.Empty()) {
        return;
    }
    Instruction vector(api, PIPE_V, lanes.repeats);
    CheckOperand(vector, src);
    vector.CheckSpace(dst.Ref(), "dst", {kUb});
    vector.CheckAligned(dst.Ref(), "dst", dstAlignment);
    const Ranges sources = RangesOf(lanes, src);
    ReadRanges(vector, src.ref, src.name, sources);
    for (uint64_t repeat = 0; repeat < lanes.repeats; ++repeat) {
        for (uint64_t first = 0; first < lanes.perRepeat; first += group) {
            if (!AnyActive(lanes, repeat, first, group)) {
                continue;  // the element of dst keeps its value
            }
            const uint64_t at = dst.Ref().begin + repeat * dstRepeatBytes + first / group * sizeof(T);
            CheckApart(api, dst.Ref(), at, at + sizeof(T), src.ref, sources);
            const T sum = TreeSum(MaskedValues(lanes, src, repeat, first, group));
            vector.Write(dst.Ref(), "dst", at, at + sizeof(T));
            Store(dst.Ref(), at, sum);
        }
    }
}

template <class T>
constexpr uint64_t kLanes = kRepeatBytes / sizeof(T);

inline void CheckReduceStrides(
    const char* api, int32_t repeatTime, int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride)
{
    CheckRange(api, "repeatTime", repeatTime, 0, 255);
    CheckRange(api, "dstRepStride", dstRepStride, 0, 65535);
    CheckRange(api, "srcBlkStride", srcBlkStride, 0, 65535);
    CheckRange(api, "srcRepStride", srcRepStride, 0, 65535);
}

}  // namespace ascendc_model

namespace AscendC {

// One sum for each repeat. Newer documents call it ReduceRepeat<ReduceType::SUM>.
template <typename T, bool isSetMask = true, typename Mask>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const Mask mask, const int32_t repeatTime,
    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride)
{
    using namespace ascendc_model;
    CheckReduceStrides("WholeReduceSum", repeatTime, dstRepStride, srcBlkStride, srcRepStride);
    ReduceGroups<T>("WholeReduceSum", MaskLanes<isSetMask>("WholeReduceSum", mask, repeatTime, kLanes<T>), kLanes<T>,
        sizeof(T), dstRepStride * sizeof(T), dst, Operand<T>("src", src, srcBlkStride, srcRepStride));
}

// One sum for each data block, eight for each repeat. repeatTime comes before mask here.
template <typename T, bool isSetMask = true, typename Mask>
void BlockReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const Mask mask,
    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride)
{
    using namespace ascendc_model;
    CheckReduceStrides("BlockReduceSum", repeatTime, dstRepStride, srcBlkStride, srcRepStride);
    ReduceGroups<T>("BlockReduceSum", MaskLanes<isSetMask>("BlockReduceSum", mask, repeatTime, kLanes<T>),
        kDataBlock / sizeof(T), 8 * sizeof(T), dstRepStride * 8 * sizeof(T), dst,
        Operand<T>("src", src, srcBlkStride, srcRepStride));
}

// One sum for each pair of neighbours. repeatTime comes before mask here.
template <typename T, bool isSetMask = true, typename Mask>
void PairReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const Mask mask,
    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride)
{
    using namespace ascendc_model;
    CheckReduceStrides("PairReduceSum", repeatTime, dstRepStride, srcBlkStride, srcRepStride);
    ReduceGroups<T>("PairReduceSum", MaskLanes<isSetMask>("PairReduceSum", mask, repeatTime, kLanes<T>), 2, kDataBlock,
        dstRepStride * kRepeatBytes / 2, dst, Operand<T>("src", src, srcBlkStride, srcRepStride));
}

// One sum in all: a tree within each repeat, the repeats one after the other. This form does not use sharedTmpBuffer.
template <typename T, bool isSetMask = true>
void ReduceSum(
    const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer, const int32_t count)
{
    using namespace ascendc_model;
    const char* api = "ReduceSum";
    CheckType<half, float>(api, "src", static_cast<const T*>(nullptr));
    const Lanes lanes = CountLanes<isSetMask>(api, count, kLanes<T>);
    if (lanes.Empty()) {
        return;
    }
    const Operand<T> from("src", src, kLanes<T>);
    Instruction vector(api, PIPE_V, lanes.repeats);
    CheckOperand(vector, from);
    vector.CheckAligned(sharedTmpBuffer.Ref(), "sharedTmpBuffer", kDataBlock);
    vector.CheckAligned(dst.Ref(), "dst", sizeof(T));
    const Ranges sources = RangesOf(lanes, from);
    ReadRanges(vector, from.ref, from.name, sources);
    CheckApart(api, dst.Ref(), dst.Ref().begin, dst.Ref().begin + sizeof(T), from.ref, sources);
    T sum = TreeSum(MaskedValues(lanes, from, 0, 0, kLanes<T>));
    for (uint64_t repeat = 1; repeat < lanes.repeats; ++repeat) {
        sum = Rounded<T>(Widen(sum) + Widen(TreeSum(MaskedValues(lanes, from, repeat, 0, kLanes<T>))));
    }
    vector.Write(dst.Ref(), "dst", dst.Ref().begin, dst.Ref().begin + sizeof(T));
    Store(dst.Ref(), dst.Ref().begin, sum);
}

// One sum in all: a tree within each repeat and a tree of the repeats, which sharedTmpBuffer holds in between.
template <typename T, typename Mask>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
    const Mask mask, const int32_t repeatTime, const int32_t srcRepStride)
{
    using namespace ascendc_model;
    const char* api = "ReduceSum";
    CheckType<half, float>(api, "src", static_cast<const T*>(nullptr));
    CheckRange(api, "srcRepStride", srcRepStride, 0, 65535);
    CheckRange(api, "repeatTime", repeatTime, 0, INT32_MAX);
    const Lanes lanes = MaskLanes<true>(api, mask, repeatTime, kLanes<T>);
    if (lanes.Empty()) {
        return;
    }
    const Operand<T> from("src", src, 1, srcRepStride);
    Instruction vector(api, PIPE_V, lanes.repeats);
    CheckOperand(vector, from);
    vector.CheckAligned(sharedTmpBuffer.Ref(), "sharedTmpBuffer", kDataBlock);
    vector.CheckAligned(dst.Ref(), "dst", sizeof(T));
    const Ranges sources = RangesOf(lanes, from);
    ReadRanges(vector, from.ref, from.name, sources);
    CheckApart(api, dst.Ref(), dst.Ref().begin, dst.Ref().begin + sizeof(T), from.ref, sources);
    const uint64_t needed = (lanes.repeats * sizeof(T) + kDataBlock - 1) / kDataBlock * kDataBlock;
    if (sharedTmpBuffer.GetLength() < needed) {
        Refuse(api, "sharedTmpBuffer has ", sharedTmpBuffer.GetLength(), " bytes and needs ", needed);
    }
    std::vector<T> sums;
    for (uint64_t repeat = 0; repeat < lanes.repeats; ++repeat) {
        sums.push_back(TreeSum(MaskedValues(lanes, from, repeat, 0, kLanes<T>)));
    }
    const uint64_t scratch = sharedTmpBuffer.Ref().begin;
    vector.Write(sharedTmpBuffer.Ref(), "sharedTmpBuffer", scratch, scratch + needed);
    Me().memories[kUb].Poison(scratch, needed);
    vector.Write(dst.Ref(), "dst", dst.Ref().begin, dst.Ref().begin + sizeof(T));
    Store(dst.Ref(), dst.Ref().begin, TreeSum(std::move(sums)));
}

}  // namespace AscendC
