// The device as MindSpore's dry run sees it: what it is called, how many there are, and how much memory one has.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

extern "C" {

const char* aclrtGetSocName() { return std::getenv("MINDLORA_DRY_RUN_SOC"); }

int aclrtGetDeviceCount(uint32_t* count)
{
    *count = 8;
    return 0;
}

int aclrtGetDevice(int32_t* device)
{
    *device = 0;
    return 0;
}

int aclrtGetMemInfo(int, size_t* free, size_t* total)
{
    *free = *total = size_t{64} << 30;
    return 0;
}

const char* aclGetRecentErrMsg() { return "a stand-in for CANN has no messages"; }

}
