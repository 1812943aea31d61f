// The device as MindSpore's dry run sees it: what it is called, how many there are, and how much memory one has.
#include <cstddef>
#include <cstdint>

extern "C" {

const char* aclrtGetSocName() { return "Ascend910B1"; }

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

// The version, whole and in its parts, of which MindSpore reads the numbers when it fuses operators.
struct PackageVersion {
    char whole[128];
    char parts[4][64];  // major, minor, release, patch
    char reserved[128];
};

int aclsysGetCANNVersion(int, PackageVersion* version)
{
    *version = {"8.5.0", {"8", "5", "0", "0"}, ""};
    return 0;
}

// A device that launches kernels has messages of its own.
__attribute__((weak)) const char* aclGetRecentErrMsg() { return "a stand-in for CANN has no messages"; }
}
