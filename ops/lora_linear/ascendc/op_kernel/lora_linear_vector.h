// The vector cores of lora_linear's cube kernel: they add up the cube cores' parts of x A^T.
#pragma once

#include "ascendc_common/partial_sums.h"
#include "lora_linear_tiling.h"

namespace mindlora {

// Between the cube and the vector cores of a block.
constexpr uint16_t kPartialsWritten = 0;
constexpr uint16_t kLowWritten = 1;

// A fractal of ones, by which the bias is multiplied.
template <typename T>
__aicore__ inline void WriteOnes(AscendC::TPipe& pipe, const AscendC::GlobalTensor<T>& dst)
{
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> queue;
    pipe.InitBuffer(queue, 1, kFractalSize * sizeof(T));
    AscendC::LocalTensor<uint16_t> bits = queue.template AllocTensor<uint16_t>();
    AscendC::Duplicate<uint16_t>(bits, CubeType<T>::kOne, kFractalSize);
    queue.EnQue(bits);
    bits = queue.template DeQue<uint16_t>();
    AscendC::DataCopy(dst, bits.template ReinterpretCast<T>(), kFractalSize);
    queue.FreeTensor(bits);
}

template <typename T>
__aicore__ inline void LoraLinearVector(
    AscendC::TPipe& pipe, const LoraLinearTiling& sizes, const PrefillExchange<T>& exchange, GM_ADDR scale)
{
    const auto core = static_cast<uint32_t>(AscendC::GetBlockIdx());
    const auto cores = static_cast<uint32_t>(AscendC::GetBlockNum() * AscendC::GetSubBlockNum());
    PartialSums<T> sums(pipe, exchange, sizes.cube.shrinkSlices, sizes.cube.reduceTile);
    if (sizes.hasBias != 0 && core == 0) {
        WriteOnes(pipe, exchange.constant);
    }
    // Each waits for the cube core of its block, then for the other vector cores, and so for all cube cores.
    AscendC::CrossCoreWaitFlag(kPartialsWritten);
    AscendC::SyncAll();
    sums.Reduce(Share(exchange.size, kFractalSide, cores, core), Global<float>(scale).GetValue(0));
    AscendC::SyncAll();
    AscendC::CrossCoreSetFlag<2, PIPE_MTE3>(kLowWritten);
}

}  // namespace mindlora
