// Duplicate, Brcb, Copy.
#pragma once

#include "vector.h"

namespace ascendc_model {

template <class T>
void CheckFillType(const char* api)
{
    CheckType<int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>(
        api, "dst", static_cast<const T*>(nullptr));
}

}  // namespace ascendc_model

namespace AscendC {

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count)
{
    using namespace ascendc_model;
    constexpr uint64_t n = kRepeatBytes / sizeof(T);
    CheckFillType<T>("Duplicate");
    Elementwise("Duplicate", CountLanes("Duplicate", count, n), Operand<T>("dst", dst, n), [&] { return scalarValue; });
}

template <typename T, bool isSetMask = true, typename Mask>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, Mask mask, const ascendc_model::U8 repeatTime,
    const ascendc_model::U16 dstBlockStride, const ascendc_model::U8 dstRepeatStride)
{
    using namespace ascendc_model;
    CheckFillType<T>("Duplicate");
    Elementwise("Duplicate", MaskLanes<isSetMask>("Duplicate", mask, repeatTime, kRepeatBytes / sizeof(T)),
        Operand<T>("dst", dst, dstBlockStride, dstRepeatStride), [&] { return scalarValue; });
}

template <typename T, bool isSetMask = true, typename Mask>
void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const Mask mask, const ascendc_model::U8 repeatTime,
    const CopyRepeatParams& p)
{
    using namespace ascendc_model;
    CheckFillType<T>("Copy");
    CheckRange("Copy", "dstRepeatSize", p.dstRepeatSize, 0, 4095);
    CheckRange("Copy", "srcRepeatSize", p.srcRepeatSize, 0, 4095);
    if (Me().mask.counter) {
        Refuse("Copy", "counter mode has a meaning of its own here, which is not modelled");
    }
    Elementwise(
        "Copy", MaskLanes<isSetMask>("Copy", mask, repeatTime, kRepeatBytes / sizeof(T)),
        Operand<T>("dst", dst, p.dstStride, p.dstRepeatSize), [](T value) { return value; },
        Operand<T>("src", src, p.srcStride, p.srcRepeatSize));
}

// Each of eight numbers fills a data block.
template <typename T>
void Brcb(
    const LocalTensor<T>& dst, const LocalTensor<T>& src, const ascendc_model::U8 repeatTime, const BrcbRepeatParams& p)
{
    using namespace ascendc_model;
    constexpr uint64_t kNumbers = 8;
    CheckFillType<T>("Brcb");
    if (repeatTime == 0) {
        return;
    }
    Instruction vector("Brcb", PIPE_V, repeatTime);
    const Operand<T> to("dst", dst, p.dstBlkStride, p.dstRepStride);
    CheckOperand(vector, to);
    CheckOperand(vector, Operand<T>("src", src, 1, 0));
    if (p.dstBlkStride == 0) {
        Refuse("Brcb", "dstBlkStride is 0, which is undefined");
    }
    const uint64_t begin = src.Ref().begin;
    const uint64_t end = begin + repeatTime * kNumbers * sizeof(T);
    vector.Read(src.Ref(), "src", begin, end);
    const Lanes all{kRepeatBytes / sizeof(T), repeatTime};
    const Ranges ranges = RangesOf(all, to);
    for (const auto& [low, high] : ranges) {
        if (dst.Ref().slot == src.Ref().slot && low < end && begin < high) {
            Refuse("Brcb", "src and dst overlap");
        }
    }
    WriteRanges(vector, dst.Ref(), "dst", ranges);
    for (uint64_t repeat = 0; repeat < all.repeats; ++repeat) {
        for (uint64_t lane = 0; lane < all.perRepeat; ++lane) {
            const uint64_t number = repeat * kNumbers + lane * sizeof(T) / kDataBlock;
            Store(dst.Ref(), to.At(repeat, lane), Load<T>(src.Ref(), begin + number * sizeof(T)));
        }
    }
}

}  // namespace AscendC
