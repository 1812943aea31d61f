// What the cube and the vector cores exchange through the workspace when they share a LoRA product.
#pragma once

#include "ascendc_common/cube.h"

namespace mindlora {

constexpr uint32_t kConstantsSize = 2 * kFractalSize;  // see WriteConstants

template <typename T>
struct PrefillExchange {
    __aicore__ inline PrefillExchange(uint32_t tokens, uint32_t rank, uint32_t slices, GM_ADDR workspace)
        : size(tokens * rank), stride(RoundToFractal(size))
    {
        const GM_ADDR lowBegin = workspace + uint64_t{stride} * slices * sizeof(float);
        partials.SetGlobalBuffer((__gm__ float*)workspace);
        low.SetGlobalBuffer((__gm__ T*)lowBegin);
        constants.SetGlobalBuffer((__gm__ T*)(lowBegin + stride * sizeof(T)));
    }

    uint32_t size;                          // of low
    uint32_t stride;                        // from one slice's partial sums to the next one's
    AscendC::GlobalTensor<float> partials;  // [slices][tokens, rank]
    AscendC::GlobalTensor<T> low;           // [tokens, rank]
    AscendC::GlobalTensor<T> constants;     // two fractals
};

// An identity and a fractal of NaN, for the cube cores, which cannot make them.
template <typename T, typename Queue>
__aicore__ inline void WriteConstants(Queue& queue, const PrefillExchange<T>& exchange)
{
    constexpr uint32_t kHalf = kFractalSize / 2;  // the numbers of one vector instruction
    AscendC::LocalTensor<uint16_t> bits = queue.template AllocTensor<uint16_t>();
    AscendC::Duplicate<uint16_t>(bits, 0, kFractalSize);
    for (uint32_t part = 0; part < 2; ++part) {
        uint64_t diagonal[2] = {0, 0};
        for (uint32_t row = part * kFractalSide / 2; row < (part + 1) * kFractalSide / 2; ++row) {
            const uint32_t at = row * (kFractalSide + 1) - part * kHalf;
            diagonal[at / 64] |= uint64_t{1} << at % 64;
        }
        AscendC::Duplicate<uint16_t>(bits[part * kHalf], CubeType<T>::kOne, diagonal, 1, 1, 8);
    }
    AscendC::Duplicate<uint16_t>(bits[kFractalSize], CubeType<T>::kNan, kFractalSize);
    queue.EnQue(bits);
    bits = queue.template DeQue<uint16_t>();
    AscendC::DataCopy(exchange.constants, bits.template ReinterpretCast<T>(), kConstantsSize);
    queue.FreeTensor(bits);
}

}  // namespace mindlora
