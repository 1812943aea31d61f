// The cube unit: LoadData from L1 to L0A and L0B, Mmad, Fixpipe from L0C to GM.
//
// Fractals of 16-bit types are 16 x 16 elements, 512 bytes. A is in L0A as zZ (fractals row by row, rows within),
// B in L0B as Zn (fractals row by row, columns within), C in L0C as Nz (fractals column by column, rows within).
#pragma once

#include "copy.h"
#include "vector.h"

namespace ascendc_model {

constexpr uint64_t kFractalSide = 16;
constexpr uint64_t kFractal = kFractalSide * kFractalSide;
constexpr uint64_t kFractalBytes = 512;

inline uint64_t Fractals(uint64_t size) { return (size + kFractalSide - 1) / kFractalSide; }

// A matrix in fractals: outer fractals one after the other, `inner` of them in each row (or column) of fractals.
struct FractalMatrix {
    uint64_t begin;
    uint64_t elementSize;
    uint64_t innerFractals;

    uint64_t At(uint64_t outer, uint64_t inner, uint64_t row, uint64_t column) const
    {
        return begin + elementSize * ((outer * innerFractals + inner) * kFractal + row * kFractalSide + column);
    }
};

// The bytes of a matrix with `outer` x `inner` elements, fractal by fractal; `rowsAreOuter` says which of the two runs
// over the rows of a fractal.
inline Ranges MatrixRanges(const FractalMatrix& matrix, uint64_t outer, uint64_t inner, bool rowsAreOuter)
{
    Ranges ranges;
    for (uint64_t o = 0; o < Fractals(outer); ++o) {
        for (uint64_t i = 0; i < Fractals(inner); ++i) {
            const uint64_t outerSize = std::min(kFractalSide, outer - o * kFractalSide);
            const uint64_t innerSize = std::min(kFractalSide, inner - i * kFractalSide);
            for (uint64_t row = 0; row < (rowsAreOuter ? outerSize : innerSize); ++row) {
                const uint64_t at = matrix.At(o, i, row, 0);
                Extend(ranges, at, at + (rowsAreOuter ? innerSize : outerSize) * matrix.elementSize);
            }
        }
    }
    return ranges;
}

template <class T>
void LoadFractals(const char* api, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
    uint64_t startIndex, uint64_t repeatTimes, uint64_t srcStride, uint64_t dstGap, bool transpose)
{
    if (repeatTimes == 0) {
        return;
    }
    Instruction load(api, PIPE_MTE1);
    load.CheckSpace(dst.Ref(), "dst", {kL0a, kL0b});
    load.CheckAligned(dst.Ref(), "dst", kFractalBytes);
    load.CheckSpace(src.Ref(), "src", {kL1});
    load.CheckAligned(src.Ref(), "src", kDataBlock);
    if (transpose && sizeof(T) != 2) {
        Refuse(api, "transposition is for 16-bit types, the tensors are of ", kTypeName<T>);
    }
    for (uint64_t i = 0; i < repeatTimes; ++i) {
        const uint64_t from = src.Ref().begin + (startIndex + i * srcStride) * kFractalBytes;
        const uint64_t to = dst.Ref().begin + i * (dstGap + 1) * kFractalBytes;
        // Rows and columns that pad a matrix may be unwritten; the cube decides whether it needs them.
        const uint8_t* bytes = load.Read(src.Ref(), "src", from, from + kFractalBytes, true);
        const uint8_t* written = load.Written(src.Ref(), from);
        uint8_t* target = load.Write(dst.Ref(), "dst", to, to + kFractalBytes);
        uint8_t* targetWritten = load.Written(dst.Ref(), to);
        for (uint64_t at = 0; at < kFractalBytes; ++at) {
            const uint64_t element = at / 2;
            const uint64_t turned = element % kFractalSide * kFractalSide + element / kFractalSide;
            const uint64_t source = transpose ? turned * 2 + at % 2 : at;
            target[at] = bytes[source];
            targetWritten[at] = written[source];
        }
    }
}

// A matrix as rows of float.
template <class T, class At>
std::vector<float> Unpack(const LocalRef& ref, uint64_t rows, uint64_t columns, const At& at)
{
    std::vector<float> values(rows * columns);
    for (uint64_t row = 0; row < rows; ++row) {
        for (uint64_t column = 0; column < columns; ++column) {
            values[row * columns + column] = Widen(Load<T>(ref, at(row, column)));
        }
    }
    return values;
}

// Documents of CANN's development branch: NaN in an operand of Mmad may end in an error of execution.
inline void RefuseNan(const char* operand, const std::vector<float>& values, uint64_t columns)
{
    for (uint64_t at = 0; at < values.size(); ++at) {
        if (std::isnan(values[at])) {
            Refuse("Mmad", operand, " has NaN in row ", at / columns, ", column ", at % columns,
                ", which may end in an error of execution");
        }
    }
}

}  // namespace ascendc_model

namespace AscendC {

template <typename T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& loadDataParams)
{
    const LoadData2DParams& p = loadDataParams;
    if (p.addrMode != 0) {
        ascendc_model::Refuse("LoadData", "addrMode ", int{p.addrMode}, " is for GM to L1 only");
    }
    ascendc_model::LoadFractals(
        "LoadData", dst, src, p.startIndex, p.repeatTimes, p.srcStride, p.dstGap, p.ifTranspose);
}

template <typename T>
void LoadDataWithTranspose(
    const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2dTransposeParams& loadDataParams)
{
    static_assert(sizeof(T) == 2, "LoadDataWithTranspose is modelled for 16-bit types");
    const LoadData2dTransposeParams& p = loadDataParams;
    if (p.addrMode != 0) {
        ascendc_model::Refuse("LoadDataWithTranspose", "addrMode ", int{p.addrMode}, " is not modelled");
    }
    ascendc_model::LoadFractals(
        "LoadDataWithTranspose", dst, src, p.startIndex, p.repeatTimes, p.srcStride, p.dstGap, true);
}

// C = A * B, or C += A * B with cmatrixInitVal false, in float.
template <typename T, typename U, typename S>
void Mmad(
    const LocalTensor<T>& dst, const LocalTensor<U>& fm, const LocalTensor<S>& filter, const MmadParams& mmadParams)
{
    using namespace ascendc_model;
    static_assert(std::is_same_v<T, float> && std::is_same_v<U, S> && kIsOneOf<U, half, bfloat16_t>,
        "Mmad is modelled for half x half and bfloat16_t x bfloat16_t into float");
    const MmadParams& p = mmadParams;
    for (const auto& [name, value] : {std::pair("m", p.m), std::pair("n", p.n), std::pair("k", p.k)}) {
        CheckRange("Mmad", name, value, 0, 4095);
    }
    if (p.isBias || p.cmatrixSource || p.unitFlag != 0 || p.kDirectionAlign) {
        Refuse("Mmad", "isBias, cmatrixSource, unitFlag and kDirectionAlign are not modelled");
    }
    if (p.m == 0 || p.n == 0 || p.k == 0) {
        return;
    }
    Instruction cube("Mmad", PIPE_M, Fractals(p.m) * Fractals(p.n) * Fractals(p.k));
    cube.CheckSpace(dst.Ref(), "dst", {kL0c});
    cube.CheckAligned(dst.Ref(), "dst", 1024);
    cube.CheckSpace(fm.Ref(), "fm", {kL0a});
    cube.CheckAligned(fm.Ref(), "fm", kFractalBytes);
    cube.CheckSpace(filter.Ref(), "filter", {kL0b});
    cube.CheckAligned(filter.Ref(), "filter", kFractalBytes);
    const uint64_t m = p.m, n = p.n, k = p.k;
    const FractalMatrix a{fm.Ref().begin, sizeof(U), Fractals(k)};
    const FractalMatrix b{filter.Ref().begin, sizeof(U), Fractals(n)};
    const FractalMatrix c{dst.Ref().begin, sizeof(T), Fractals(m)};
    // With one row the cube does a GEMV: it reads A as k consecutive numbers.
    const bool gemv = m == 1;
    const auto atA = [&](uint64_t row, uint64_t col) {
        return gemv ? a.begin + col * sizeof(U) : a.At(row / 16, col / 16, row % 16, col % 16);
    };
    ReadRanges(cube, fm.Ref(), "fm", gemv ? Ranges{{a.begin, a.begin + k * sizeof(U)}} : MatrixRanges(a, m, k, true));
    ReadRanges(cube, filter.Ref(), "filter", MatrixRanges(b, k, n, false));
    const Ranges result = MatrixRanges(c, n, m, false);
    if (!p.cmatrixInitVal) {
        ReadRanges(cube, dst.Ref(), "dst", result);
    }
    WriteRanges(cube, dst.Ref(), "dst", result);
    const auto left = Unpack<U>(fm.Ref(), m, k, atA);
    const auto right = Unpack<U>(
        filter.Ref(), k, n, [&](uint64_t row, uint64_t col) { return b.At(row / 16, col / 16, col % 16, row % 16); });
    RefuseNan("fm", left, k);
    RefuseNan("filter", right, n);
    std::vector<float> sums(n);
    for (uint64_t row = 0; row < m; ++row) {
        const auto atC = [&](uint64_t col) { return c.At(col / 16, row / 16, row % 16, col % 16); };
        for (uint64_t col = 0; col < n; ++col) {
            sums[col] = p.cmatrixInitVal ? 0.0f : Load<float>(dst.Ref(), atC(col));
        }
        for (uint64_t inner = 0; inner < k; ++inner) {
            const float factor = left[row * k + inner];
            const float* line = &right[inner * n];
            for (uint64_t col = 0; col < n; ++col) {
                sums[col] += factor * line[col];
            }
        }
        for (uint64_t col = 0; col < n; ++col) {
            Store(dst.Ref(), atC(col), sums[col]);
        }
    }
    // Documented: from this size on the next Mmad may build on this one without PipeBarrier<PIPE_M>.
    if ((m / 16) * (n / 16) >= 10) {
        TheDevice().clocks.WaitForItself(MyThread(PIPE_M));
    }
}

// L0C -> GM, to rows (the default) or as Nz.
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& intriParams)
{
    using namespace ascendc_model;
    static_assert(std::is_same_v<U, float> && kIsOneOf<T, float, half, bfloat16_t>,
        "Fixpipe is modelled from float to float, half and bfloat16_t");
    static_assert(config.format == CO2Layout::ROW_MAJOR, "Fixpipe is modelled for CFG_ROW_MAJOR");
    const char* api = "Fixpipe";
    const FixpipeParamsV220& p = intriParams;
    CheckRange(api, "nSize", p.nSize, 0, 4095);
    CheckRange(api, "mSize", p.mSize, 0, 8192);
    const QuantMode_t wanted = std::is_same_v<T, half> ? F322F16 : std::is_same_v<T, bfloat16_t> ? F322BF16 : NoQuant;
    if (p.quantPre != wanted) {
        static const char* const names[] = {"NoQuant", "F322F16", "F322BF16"};
        Refuse(api, "dst is of type ", kTypeName<T>, ", which needs quantPre ", names[wanted], "; it is ",
            p.quantPre <= F322BF16 ? names[p.quantPre] : "another");
    }
    if (p.unitFlag != 0 || p.isChannelSplit || p.deqScalar != 0 || p.reluEn || p.ndNum > 1) {
        Refuse(api, "unitFlag, isChannelSplit, deqScalar, reluEn and ndNum above 1 are not modelled");
    }
    if (p.nSize == 0 || p.mSize == 0 || p.ndNum == 0) {
        return;
    }
    if (p.dstStride < p.nSize && (p.mSize > 1 || p.dstStride == 0)) {
        Refuse(api, "dstStride ", p.dstStride, " is less than nSize ", p.nSize, ": rows of dst overlap");
    }
    Instruction fix(api, PIPE_FIX);
    fix.CheckSpace(src.Ref(), "src", {kL0c});
    fix.CheckAligned(src.Ref(), "src", 64);
    std::vector<T> line(p.nSize);
    for (uint64_t row = 0; row < p.mSize; ++row) {
        for (uint64_t col = 0; col < p.nSize; col += kFractalSide) {
            const uint64_t count = std::min(kFractalSide, p.nSize - col);
            const uint64_t at = src.Ref().begin + sizeof(float) * (col * p.srcStride + row * kFractalSide);
            fix.Read(src.Ref(), "src", at, at + count * sizeof(float));
            for (uint64_t i = 0; i < count; ++i) {
                line[col + i] = Rounded<T>(Load<float>(src.Ref(), at + i * sizeof(float)));
            }
        }
        StoreGm<T>(fix, dst.Ref(), dst.Ref().offset + static_cast<int64_t>(row * p.dstStride * sizeof(T)),
            reinterpret_cast<const uint8_t*>(line.data()), line.size() * sizeof(T));
    }
}

}  // namespace AscendC
