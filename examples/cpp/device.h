// What the examples share: a device with a stream, tensors in its memory, and an end with a message when a call fails.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "acl/acl.h"
#include "aclnn/aclnn_base.h"

inline void Check(int status, const char* call)
{
    if (status != ACL_SUCCESS) {
        const char* message = aclGetRecentErrMsg();
        std::fprintf(stderr, "%s returned %d: %s\n", call, status, message != nullptr ? message : "no message");
        std::exit(1);
    }
}
#define CHECK(call) Check((call), #call)

// Device 0 and one stream on it.
class Device {
public:
    Device()
    {
        CHECK(aclInit(nullptr));
        CHECK(aclrtSetDevice(0));
        CHECK(aclrtCreateStream(&stream_));
    }
    ~Device()
    {
        CHECK(aclrtDestroyStream(stream_));
        CHECK(aclrtResetDevice(0));
        CHECK(aclFinalize());
    }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    aclrtStream stream() const { return stream_; }

private:
    aclrtStream stream_ = nullptr;
};

// Bytes of device memory; none for size 0.
class Memory {
public:
    explicit Memory(uint64_t size)
    {
        if (size > 0) {
            CHECK(aclrtMalloc(&address_, size, ACL_MEM_MALLOC_HUGE_FIRST));
        }
    }
    ~Memory()
    {
        if (address_ != nullptr) {
            CHECK(aclrtFree(address_));
        }
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void* address() const { return address_; }

private:
    void* address_ = nullptr;
};

// A contiguous float32 tensor.
class Tensor {
public:
    Tensor(const std::vector<int64_t>& shape, const std::vector<float>& values)
        : count_(values.size()), memory_(count_ * sizeof(float))
    {
        CHECK(aclrtMemcpy(memory_.address(), bytes(), values.data(), bytes(), ACL_MEMCPY_HOST_TO_DEVICE));
        tensor_ = aclCreateTensor(shape.data(), shape.size(), ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, shape.data(),
                                  shape.size(), memory_.address());
    }
    ~Tensor() { CHECK(aclDestroyTensor(tensor_)); }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    aclTensor* get() const { return tensor_; }

    void Print(const char* name) const
    {
        std::vector<float> values(count_);
        CHECK(aclrtMemcpy(values.data(), bytes(), memory_.address(), bytes(), ACL_MEMCPY_DEVICE_TO_HOST));
        std::printf("%s:", name);
        for (float value : values) {
            std::printf(" %.9g", value);
        }
        std::printf("\n");
    }

private:
    size_t bytes() const { return count_ * sizeof(float); }

    size_t count_;
    Memory memory_;
    aclTensor* tensor_ = nullptr;
};
