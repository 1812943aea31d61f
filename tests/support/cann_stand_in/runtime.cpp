// libascendcl.so and libnnopbase.so of the stand-in: the device is this process.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>

#include "stand_in.h"

namespace {
std::string& Message()
{
    static std::string message;
    return message;
}
}  // namespace

int StandInFailure(const char* function)
{
    const char* wanted = std::getenv("MINDLORA_STAND_IN_FAIL");
    const size_t length = std::strlen(function);
    if (wanted == nullptr || std::strncmp(wanted, function, length) != 0 || wanted[length] != ':') return 0;
    Message() = "as the test asked\nsecond line";
    return std::atoi(wanted + length + 1);
}

void StandInMessage(const char* text) { Message() = text; }
void StandInRan(const char*, const std::vector<const aclTensor*>&) {}

extern "C" {

const char* aclGetRecentErrMsg() { return Message().empty() ? nullptr : Message().c_str(); }
const char* aclrtGetSocName() { return "StandIn"; }
aclError aclInit(const char*) { return StandInFailure("aclInit"); }
aclError aclFinalize() { return 0; }
aclError aclrtSetDevice(int32_t) { return StandInFailure("aclrtSetDevice"); }
aclError aclrtResetDevice(int32_t) { return 0; }
aclError aclrtCreateStream(aclrtStream*) { return StandInFailure("aclrtCreateStream"); }
aclError aclrtDestroyStream(aclrtStream) { return 0; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t)
{
    return StandInFailure("aclrtSynchronizeStreamWithTimeout");
}

float aclFloat16ToFloat(aclFloat16 value)
{
    const int exponent = value >> 10 & 31, mantissa = value & 1023;
    float size = std::ldexp(static_cast<float>(exponent == 0 ? mantissa : mantissa + 1024), std::max(exponent, 1) - 25);
    if (exponent == 31) size = mantissa == 0 ? INFINITY : NAN;
    return value >> 15 == 0 ? size : -size;
}

aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy)
{
    *devPtr = std::malloc(size);
    return size == 0 ? 100000 : StandInFailure("aclrtMalloc");
}

aclError aclrtFree(void* devPtr)
{
    std::free(devPtr);
    return 0;
}

aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind)
{
    if (count > destMax) return 100000;
    std::memcpy(dst, src, count);
    return StandInFailure("aclrtMemcpy");
}

aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t*, int64_t,
    aclFormat, const int64_t*, uint64_t, void* tensorData)
{
    return new aclTensor{dataType, std::vector<int64_t>(viewDims, viewDims + viewDimsNum), tensorData};
}

// CANN finds the tensor by its place among the operator's arguments.
aclnnStatus aclSetTensorAddr(aclOpExecutor*, const size_t, aclTensor* tensor, void* addr)
{
    tensor->data = addr;
    return 0;
}

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor)
{
    executor->repeatable = true;
    return 0;
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor)
{
    delete tensor;
    return 0;
}

}  // extern "C"
