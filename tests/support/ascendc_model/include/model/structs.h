// The parameter structures of the API. A field refuses a number that it cannot hold: on the device the number would
// be cut off silently.
#pragma once

#include <type_traits>

#include "error.h"
#include "half.h"

namespace ascendc_model {

template <class T>
struct Field {
    Field() = default;
    template <class U, std::enable_if_t<std::is_integral_v<U>, int> = 0>
    Field(U number) : value(static_cast<T>(number))
    {
        if (static_cast<__int128>(number) != static_cast<__int128>(value)) {
            Refuse("parameter", +number, " does not fit a parameter of ", 8 * sizeof(T),
                std::is_signed_v<T> ? " bits" : " unsigned bits");
        }
    }
    template <class U, std::enable_if_t<!std::is_same_v<U, T>, int> = 0>
    Field(Field<U> other) : Field(other.value)
    {}
    operator T() const { return value; }

    T value;
};

using U8 = Field<uint8_t>;
using U16 = Field<uint16_t>;
using U32 = Field<uint32_t>;

}  // namespace ascendc_model

// Built-in names of the device compiler.
enum QuantMode_t { NoQuant, F322F16, F322BF16, DEQF16, VDEQF16, QF322B8_PRE, VQF322B8_PRE, REQ8, VREQ8 };

// A namespace of their own, so that AscendC gets these names and not the model's.
namespace ascendc_model::parameters {

struct DataCopyParams {
    DataCopyParams() = default;
    DataCopyParams(U16 count, U16 len, U16 srcGapIn, U16 dstGapIn)
        : blockCount(count), blockLen(len), srcGap(srcGapIn), dstGap(dstGapIn)
    {}
    U16 blockCount = 1;
    U16 blockLen = 0;
    // The gaps have the name of newer and of older documents.
    union {
        U16 srcGap = 0;
        U16 srcStride;
    };
    union {
        U16 dstGap = 0;
        U16 dstStride;
    };
};

struct DataCopyExtParams {
    DataCopyExtParams() = default;
    DataCopyExtParams(U16 count, U32 len, U32 srcStrideIn, U32 dstStrideIn, U32 rsvIn)
        : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn), rsv(rsvIn)
    {}
    U16 blockCount = 1;
    U32 blockLen = 0;
    U32 srcStride = 0;
    U32 dstStride = 0;
    U32 rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
    DataCopyPadExtParams() = default;
    DataCopyPadExtParams(bool isPadIn, U8 leftPaddingIn, U8 rightPaddingIn, T paddingValueIn)
        : isPad(isPadIn), leftPadding(leftPaddingIn), rightPadding(rightPaddingIn), paddingValue(paddingValueIn)
    {}
    bool isPad = false;
    U8 leftPadding = 0;
    U8 rightPadding = 0;
    T paddingValue{};
};

struct Nd2NzParams {
    Nd2NzParams() = default;
    Nd2NzParams(U16 ndNumIn, U16 nValueIn, U16 dValueIn, U16 srcNdMatrixStrideIn, U16 srcDValueIn, U16 dstNzC0StrideIn,
        U16 dstNzNStrideIn, U16 dstNzMatrixStrideIn)
        : ndNum(ndNumIn), nValue(nValueIn), dValue(dValueIn), srcNdMatrixStride(srcNdMatrixStrideIn),
          srcDValue(srcDValueIn), dstNzC0Stride(dstNzC0StrideIn), dstNzNStride(dstNzNStrideIn),
          dstNzMatrixStride(dstNzMatrixStrideIn)
    {}
    U16 ndNum = 0;
    U16 nValue = 0;
    U16 dValue = 0;
    U16 srcNdMatrixStride = 0;
    U16 srcDValue = 0;
    U16 dstNzC0Stride = 0;
    U16 dstNzNStride = 0;
    U16 dstNzMatrixStride = 0;
};

struct UnaryRepeatParams {
    UnaryRepeatParams() = default;
    UnaryRepeatParams(U16 dstBlkStrideIn, U16 srcBlkStrideIn, U8 dstRepStrideIn, U8 srcRepStrideIn)
        : dstBlkStride(dstBlkStrideIn), srcBlkStride(srcBlkStrideIn), dstRepStride(dstRepStrideIn),
          srcRepStride(srcRepStrideIn)
    {}
    U16 dstBlkStride = 1;
    U16 srcBlkStride = 1;
    U8 dstRepStride = 8;
    U8 srcRepStride = 8;
};

struct BinaryRepeatParams {
    BinaryRepeatParams() = default;
    BinaryRepeatParams(U8 dstBlkStrideIn, U8 src0BlkStrideIn, U8 src1BlkStrideIn, U8 dstRepStrideIn, U8 src0RepStrideIn,
        U8 src1RepStrideIn)
        : dstBlkStride(dstBlkStrideIn), src0BlkStride(src0BlkStrideIn), src1BlkStride(src1BlkStrideIn),
          dstRepStride(dstRepStrideIn), src0RepStride(src0RepStrideIn), src1RepStride(src1RepStrideIn)
    {}
    U8 dstBlkStride = 1;
    U8 src0BlkStride = 1;
    U8 src1BlkStride = 1;
    U8 dstRepStride = 8;
    U8 src0RepStride = 8;
    U8 src1RepStride = 8;
};

struct CopyRepeatParams {
    CopyRepeatParams() = default;
    CopyRepeatParams(U16 dstStrideIn, U16 srcStrideIn, U16 dstRepeatSizeIn, U16 srcRepeatSizeIn)
        : dstStride(dstStrideIn), srcStride(srcStrideIn), dstRepeatSize(dstRepeatSizeIn), srcRepeatSize(srcRepeatSizeIn)
    {}
    U16 dstStride = 1;
    U16 srcStride = 1;
    U16 dstRepeatSize = 8;
    U16 srcRepeatSize = 8;
};

struct BrcbRepeatParams {
    BrcbRepeatParams() = default;
    BrcbRepeatParams(U16 dstBlkStrideIn, U16 dstRepStrideIn)
        : dstBlkStride(dstBlkStrideIn), dstRepStride(dstRepStrideIn)
    {}
    U16 dstBlkStride = 1;
    U16 dstRepStride = 8;
};

struct LoadData2DParams {
    LoadData2DParams() = default;
    LoadData2DParams(
        U16 startIndexIn, U8 repeatTimesIn, U16 srcStrideIn, U8 sidIn, U16 dstGapIn, bool ifTransposeIn, U8 addrModeIn)
        : startIndex(startIndexIn), repeatTimes(repeatTimesIn), srcStride(srcStrideIn), sid(sidIn), dstGap(dstGapIn),
          ifTranspose(ifTransposeIn), addrMode(addrModeIn)
    {}
    U16 startIndex = 0;
    U8 repeatTimes = 0;
    U16 srcStride = 0;
    U8 sid = 0;
    U16 dstGap = 0;
    bool ifTranspose = false;
    U8 addrMode = 0;
};

struct LoadData2dTransposeParams {
    U16 startIndex = 0;
    U8 repeatTimes = 0;
    U16 srcStride = 0;
    U16 dstGap = 0;
    U16 dstFracGap = 0;
    U8 addrMode = 0;
};

struct MmadParams {
    U16 m = 0;
    U16 n = 0;
    U16 k = 0;
    bool isBias = false;
    U8 unitFlag = 0;
    bool kDirectionAlign = false;
    bool cmatrixSource = false;
    bool cmatrixInitVal = true;
};

enum class CO2Layout : uint8_t { NZ = 0, ROW_MAJOR, COLUMN_MAJOR };

struct FixpipeConfig {
    CO2Layout format;
};

constexpr FixpipeConfig CFG_NZ = {CO2Layout::NZ};
constexpr FixpipeConfig CFG_ROW_MAJOR = {CO2Layout::ROW_MAJOR};

struct FixpipeParamsV220 {
    U16 nSize = 0;
    U16 mSize = 0;
    U16 srcStride = 0;
    U32 dstStride = 0;
    QuantMode_t quantPre = QuantMode_t::NoQuant;
    uint64_t deqScalar = 0;
    U16 ndNum = 1;
    U16 srcNdStride = 0;
    U16 dstNdStride = 0;
    bool reluEn = false;
    U8 unitFlag = 0;
    bool isChannelSplit = false;
};

}  // namespace ascendc_model::parameters

namespace AscendC {

using namespace ascendc_model::parameters;

}  // namespace AscendC
