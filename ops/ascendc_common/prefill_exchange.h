// What the cube and the vector cores exchange through the workspace when they share a LoRA product.
#pragma once

#include "ascendc_common/cube.h"

namespace mindlora {

template <typename T>
struct PrefillExchange {
    __aicore__ inline PrefillExchange(uint32_t tokens, uint32_t rank, uint32_t slices, GM_ADDR workspace)
        : size(tokens * rank), stride(RoundToFractal(size))
    {
        const GM_ADDR lowBegin = workspace + uint64_t{stride} * slices * sizeof(float);
        partials.SetGlobalBuffer((__gm__ float*)workspace);
        low.SetGlobalBuffer((__gm__ T*)lowBegin);
        constant.SetGlobalBuffer((__gm__ T*)(lowBegin + stride * sizeof(T)));
    }

    uint32_t size;                          // of low
    uint32_t stride;                        // from one slice's partial sums to the next one's
    AscendC::GlobalTensor<float> partials;  // [slices][tokens, rank]
    AscendC::GlobalTensor<T> low;           // [tokens, rank]
    AscendC::GlobalTensor<T> constant;      // a fractal
};

// An identity, for the cube cores, which cannot make it.
template <typename T, typename Queue>
__aicore__ inline void WriteIdentity(Queue& queue, const PrefillExchange<T>& exchange)
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
    queue.EnQue(bits);
    bits = queue.template DeQue<uint16_t>();
    AscendC::DataCopy(exchange.constant, bits.template ReinterpretCast<T>(), kFractalSize);
    queue.FreeTensor(bits);
}

}  // namespace mindlora
