// DataCopy and DataCopyPad between GM and UB, GM to L1 with and without Nd2Nz, UB to UB; atomic addition to GM.
#pragma once

#include "structs.h"
#include "tensor.h"

namespace ascendc_model {

// Stores to GM as DMA does: plain, or added to what is there while SetAtomicAdd is on.
template <class T>
void StoreGm(Instruction& dma, const GmRef& dst, int64_t offset, const uint8_t* bytes, uint64_t size)
{
    const char* atomic = Me().atomicType;
    uint8_t* target = dma.WriteGm(dst, "dst", offset, size, atomic != nullptr);
    if (atomic == nullptr) {
        std::memcpy(target, bytes, size);
        return;
    }
    if (std::strcmp(atomic, kTypeName<T>) != 0) {
        Refuse(dma.api(), "dst is a tensor of ", kTypeName<T>, " under SetAtomicAdd<", atomic, ">");
    }
    for (uint64_t at = 0; at < size; at += sizeof(T)) {
        T sum, addend;
        std::memcpy(&sum, target + at, sizeof(T));
        std::memcpy(&addend, bytes + at, sizeof(T));
        if constexpr (std::is_integral_v<T>) {
            using Unsigned = std::make_unsigned_t<T>;
            sum = static_cast<T>(static_cast<Unsigned>(sum) + static_cast<Unsigned>(addend));
        } else {
            sum = Rounded<T>(Widen(sum) + Widen(addend));
        }
        std::memcpy(target + at, &sum, sizeof(T));
    }
}

// Blocks of one length with a step from one to the next on either side, in bytes.
struct Blocks {
    uint64_t count;
    uint64_t length;
    uint64_t srcStep;
    uint64_t dstStep;

    Blocks Joined() const
    {
        if (srcStep == length && dstStep == length) {
            return {1, count * length, count * length, count * length};
        }
        return *this;
    }
};

template <class T>
Blocks CountBlocks(const char* api, int64_t count)
{
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (bytes % kDataBlock != 0) {
        Refuse(api, count, " elements are ", bytes, " bytes, not a multiple of 32; DataCopyPad copies other lengths");
    }
    return {1, static_cast<uint64_t>(bytes), 0, 0};
}

inline Blocks ParamBlocks(const char* api, const AscendC::DataCopyParams& params)
{
    CheckRange(api, "blockCount", params.blockCount, 0, 4095);
    const uint64_t length = params.blockLen * kDataBlock;
    return Blocks{params.blockCount, length, length + params.srcGap * kDataBlock, length + params.dstGap * kDataBlock}
        .Joined();
}

template <class T>
void CopyIn(
    const char* api, const AscendC::LocalTensor<T>& dst, const AscendC::GlobalTensor<T>& src, const Blocks& blocks)
{
    if (blocks.count == 0 || blocks.length == 0) {
        return;
    }
    Instruction dma(api, PIPE_MTE2);
    dma.CheckSpace(dst.Ref(), "dst", {kUb, kL1});
    dma.CheckAligned(dst.Ref(), "dst", kDataBlock);
    for (uint64_t i = 0; i < blocks.count; ++i) {
        const uint8_t* from =
            dma.ReadGm(src.Ref(), "src", src.Ref().offset + static_cast<int64_t>(i * blocks.srcStep), blocks.length);
        const uint64_t at = dst.Ref().begin + i * blocks.dstStep;
        std::memcpy(dma.Write(dst.Ref(), "dst", at, at + blocks.length), from, blocks.length);
    }
}

template <class T>
void CopyOut(
    const char* api, const AscendC::GlobalTensor<T>& dst, const AscendC::LocalTensor<T>& src, const Blocks& blocks)
{
    if (blocks.count == 0 || blocks.length == 0) {
        return;
    }
    Instruction dma(api, PIPE_MTE3);
    dma.CheckSpace(src.Ref(), "src", {kUb});
    dma.CheckAligned(src.Ref(), "src", kDataBlock);
    for (uint64_t i = 0; i < blocks.count; ++i) {
        const uint64_t at = src.Ref().begin + i * blocks.srcStep;
        const uint8_t* from = dma.Read(src.Ref(), "src", at, at + blocks.length);
        StoreGm<T>(dma, dst.Ref(), dst.Ref().offset + static_cast<int64_t>(i * blocks.dstStep), from, blocks.length);
    }
}

template <class T>
void CopyOnChip(
    const char* api, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, const Blocks& blocks)
{
    if (blocks.count == 0 || blocks.length == 0) {
        return;
    }
    Instruction vector(api, PIPE_V, (uint64_t{blocks.count} * blocks.length + 255) / 256);
    for (const auto& [tensor, operand] : {std::pair(&dst.Ref(), "dst"), std::pair(&src.Ref(), "src")}) {
        vector.CheckSpace(*tensor, operand, {kUb});
        vector.CheckAligned(*tensor, operand, kDataBlock);
    }
    for (uint64_t i = 0; i < blocks.count; ++i) {
        const uint64_t from = src.Ref().begin + i * blocks.srcStep;
        const uint64_t to = dst.Ref().begin + i * blocks.dstStep;
        if (from < to + blocks.length && to < from + blocks.length) {
            Refuse(api, "src and dst overlap");
        }
        const uint8_t* bytes = vector.Read(src.Ref(), "src", from, from + blocks.length);
        std::memcpy(vector.Write(dst.Ref(), "dst", to, to + blocks.length), bytes, blocks.length);
    }
}

inline void CheckPadBlocks(const char* api, const AscendC::DataCopyExtParams& params, size_t elementSize)
{
    CheckRange(api, "blockCount", params.blockCount, 0, 4095);
    CheckRange(api, "blockLen", params.blockLen, 0, 2097151);
    if (params.blockLen % elementSize != 0) {
        Refuse(api, "blockLen ", params.blockLen, " is in bytes and must be a multiple of the element's ", elementSize);
    }
}

inline uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace ascendc_model

namespace AscendC {

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count)
{
    ascendc_model::CopyIn("DataCopy", dst, src, ascendc_model::CountBlocks<T>("DataCopy", count));
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& repeatParams)
{
    ascendc_model::CopyIn("DataCopy", dst, src, ascendc_model::ParamBlocks("DataCopy", repeatParams));
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count)
{
    ascendc_model::CopyOut("DataCopy", dst, src, ascendc_model::CountBlocks<T>("DataCopy", count));
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& repeatParams)
{
    ascendc_model::CopyOut("DataCopy", dst, src, ascendc_model::ParamBlocks("DataCopy", repeatParams));
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count)
{
    ascendc_model::CopyOnChip("DataCopy", dst, src, ascendc_model::CountBlocks<T>("DataCopy", count));
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& repeatParams)
{
    ascendc_model::CopyOnChip("DataCopy", dst, src, ascendc_model::ParamBlocks("DataCopy", repeatParams));
}

// GM -> L1, rows of a matrix to fractals: columns in groups of 32 bytes, one group below the other.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& intriParams)
{
    using namespace ascendc_model;
    const char* api = "DataCopy(Nd2Nz)";
    const Nd2NzParams& p = intriParams;
    CheckRange(api, "ndNum", p.ndNum, 0, 4095);
    CheckRange(api, "nValue", p.nValue, 0, 16384);
    if (p.ndNum == 0 || p.nValue == 0 || p.dValue == 0) {
        return;
    }
    CheckRange(api, "srcDValue", p.srcDValue, 1, 65535);
    CheckRange(api, "dstNzC0Stride", p.dstNzC0Stride, 1, 16384);
    CheckRange(api, "dstNzNStride", p.dstNzNStride, 1, 16384);
    CheckRange(api, "dstNzMatrixStride", p.dstNzMatrixStride, 0, 16384);
    Instruction dma(api, PIPE_MTE2);
    dma.CheckSpace(dst.Ref(), "dst", {kL1});
    dma.CheckAligned(dst.Ref(), "dst", kDataBlock);
    const uint64_t rowBytes = p.dValue * sizeof(T);
    std::vector<uint64_t> targets;
    for (uint64_t nd = 0; nd < p.ndNum; ++nd) {
        for (uint64_t row = 0; row < p.nValue; ++row) {
            const auto from = static_cast<int64_t>((nd * p.srcNdMatrixStride + row * p.srcDValue) * sizeof(T));
            const uint8_t* bytes = dma.ReadGm(src.Ref(), "src", src.Ref().offset + from, rowBytes);
            for (uint64_t at = 0; at < rowBytes; at += kDataBlock) {
                const uint64_t to = dst.Ref().begin + nd * p.dstNzMatrixStride * sizeof(T) + at * p.dstNzC0Stride +
                    row * p.dstNzNStride * kDataBlock;
                const uint64_t length = std::min(kDataBlock, rowBytes - at);
                uint8_t* target = dma.Write(dst.Ref(), "dst", to, to + kDataBlock);
                targets.push_back(to);
                std::memcpy(target, bytes + at, length);
                std::memset(target + length, 0, kDataBlock - length);
            }
        }
    }
    std::sort(targets.begin(), targets.end());
    if (std::adjacent_find(targets.begin(), targets.end()) != targets.end()) {
        Refuse(api, "two rows or column groups land on the same data block of dst");
    }
}

// GM -> UB. On the GM side lengths and strides are bytes; on the UB side blocks start at data blocks of 32 bytes.
template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
    const DataCopyPadExtParams<T>& padParams)
{
    using namespace ascendc_model;
    const DataCopyExtParams& p = dataCopyParams;
    CheckPadBlocks("DataCopyPad", p, sizeof(T));
    if (p.blockCount == 0 || p.blockLen == 0) {
        return;
    }
    const uint64_t left = padParams.leftPadding * sizeof(T);
    const uint64_t right = padParams.rightPadding * sizeof(T);
    CheckRange("DataCopyPad", "leftPadding in bytes", left, 0, kDataBlock);
    CheckRange("DataCopyPad", "rightPadding in bytes", right, 0, kDataBlock);
    Instruction dma("DataCopyPad", PIPE_MTE2);
    dma.CheckSpace(dst.Ref(), "dst", {kUb});
    dma.CheckAligned(dst.Ref(), "dst", kDataBlock);
    const uint64_t filled = RoundUp(left + p.blockLen + right, kDataBlock);
    for (uint64_t i = 0; i < p.blockCount; ++i) {
        const uint64_t from = i * (uint64_t{p.blockLen} + p.srcStride);
        const uint64_t to = dst.Ref().begin + i * (filled + p.dstStride * kDataBlock);
        const uint8_t* bytes = dma.ReadGm(src.Ref(), "src", src.Ref().offset + static_cast<int64_t>(from), p.blockLen);
        uint8_t* target = dma.Write(dst.Ref(), "dst", to, to + filled);
        // Documented filling: without any padding the tail repeats the block's first element; with padding it is
        // paddingValue, or without isPad random, which the simulator treats as never written.
        T filler = padParams.paddingValue;
        if (left + right == 0) {
            std::memcpy(&filler, bytes, sizeof(T));
        }
        const bool random = left + right != 0 && !padParams.isPad;
        for (uint64_t at = 0; at < filled; at += sizeof(T)) {
            std::memcpy(target + at, &filler, sizeof(T));
        }
        if (random) {
            std::memset(target, kPoison, filled);
            std::memset(dma.Written(dst.Ref(), to), 0, filled);
        }
        std::memcpy(target + left, bytes, p.blockLen);
        std::memset(dma.Written(dst.Ref(), to + left), 1, p.blockLen);
    }
}

// UB -> GM.
template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& dataCopyParams)
{
    using namespace ascendc_model;
    const DataCopyExtParams& p = dataCopyParams;
    CheckPadBlocks("DataCopyPad", p, sizeof(T));
    CopyOut("DataCopyPad", dst, src,
        Blocks{p.blockCount, p.blockLen, RoundUp(p.blockLen, kDataBlock) + p.srcStride * kDataBlock,
            uint64_t{p.blockLen} + p.dstStride}
            .Joined());
}

template <typename T>
void SetAtomicAdd()
{
    static_assert(ascendc_model::kIsOneOf<T, int8_t, int16_t, half, bfloat16_t, int32_t, float>,
        "SetAtomicAdd supports int8_t, int16_t, half, bfloat16_t, int32_t and float");
    ascendc_model::Me().atomicType = ascendc_model::kTypeName<T>;
}

inline void DisableDmaAtomic() { ascendc_model::Me().atomicType = nullptr; }
inline void SetAtomicNone() { DisableDmaAtomic(); }  // the name in older documents

}  // namespace AscendC
