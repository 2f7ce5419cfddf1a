// A simulated NCCL: transfers between processes over local sockets, in streams of the simulated driver. It has the
// functions that pipec calls. README.md says what it checks.

#include "library.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <vector>

enum Status { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };

struct UniqueId {
    char bytes[128];
};

namespace {

// How long a rank waits for the others, in milliseconds.
const int PATIENCE = 60000;

// What the ranks of a communicator tell each other.
struct Greeting {
    int rank, ranks;
    unsigned char gpu[16];
};

bool current_gpu(unsigned char* uuid) {
    auto device = (int (*)(int*))of_driver("cuCtxGetDevice");
    auto identity = (int (*)(unsigned char*, int))of_driver("cuDeviceGetUuid");
    int ordinal = 0;
    return device && identity && device(&ordinal) == 0 && identity(uuid, ordinal) == 0;
}

// Is a fault of this kind planned for the `now`th communicator of this process?
bool is_planned(const char* kind, uint64_t now) {
    auto device = (int (*)(int*))of_driver("cuCtxGetDevice");
    auto planned = (int (*)(const char*, int, uint64_t))of_driver("pipec_sim_is_planned");
    int ordinal = 0;
    return device && planned && device(&ordinal) == 0 && planned(kind, ordinal, now);
}

struct Communicator {
    int rank = 0;
    // A socket for each other rank.
    std::vector<int> sockets;
    std::atomic<bool> is_aborted{false};
    std::atomic<int> queued{0};

    ~Communicator() {
        for (int socket : sockets) {
            if (socket >= 0) close(socket);
        }
    }

    // A transfer whose peer is gone waits until it is aborted.
    void wait() {
        while (!is_aborted) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }

    bool transfer(int peer, char* bytes, size_t count, bool sends) {
        while (count > 0) {
            ssize_t done = sends ? send(sockets[peer], bytes, count, MSG_NOSIGNAL) : recv(sockets[peer], bytes, count, 0);
            if (is_aborted) return false;
            if (done < 0 && errno == EINTR) continue;
            if (done <= 0) return wait(), false;
            bytes += done;
            count -= (size_t)done;
        }
        return true;
    }
};

struct Handle {
    std::shared_ptr<Communicator> of;
};

struct Transfer {
    std::shared_ptr<Communicator> of;
    uint64_t address, bytes;
    int peer;
    bool sends;
    void* stream;

    void run(char* place) const {
        uint64_t expected = bytes;
        if (of->transfer(peer, (char*)&expected, sizeof expected, sends)) {
            if (expected != bytes) {
                fprintf(stderr, "simulated NCCL: %llu bytes are sent, %llu received\n", (unsigned long long)expected,
                        (unsigned long long)bytes);
                abort();
            }
            of->transfer(peer, place, bytes, sends);
        }
        of->queued--;
    }
};

thread_local int depth = 0;
thread_local std::vector<Transfer> group;

void run(const void* data, char* const* places) {
    std::unique_ptr<std::vector<Transfer>> transfers(*(std::vector<Transfer>* const*)data);
    std::vector<std::thread> others;
    // The transfers of a group are under way together.
    for (size_t i = 1; i < transfers->size(); i++) {
        others.emplace_back([&, i] { (*transfers)[i].run(places[i]); });
    }
    (*transfers)[0].run(places[0]);
    for (std::thread& other : others) other.join();
}

// Queues the transfers of a group, those of each stream together.
Status submit_group() {
    auto submit = (PipecSubmit*)of_driver("pipec_sim_submit");
    std::vector<Transfer> all;
    all.swap(group);
    while (!all.empty()) {
        auto* together = new std::vector<Transfer>;
        std::vector<Transfer> rest;
        std::vector<PipecRange> ranges;
        for (Transfer& one : all) {
            bool is_same = one.stream == all[0].stream;
            if (is_same) ranges.push_back({one.address, one.bytes});
            (is_same ? *together : rest).push_back(one);
        }
        for (Transfer& one : *together) one.of->queued++;
        if (!submit || submit(all[0].stream, ranges.data(), (unsigned)ranges.size(), run, &together, sizeof together) != 0) {
            for (Transfer& one : *together) one.of->queued--;
            delete together;
            return UNHANDLED_CUDA_ERROR;
        }
        all.swap(rest);
    }
    return SUCCESS;
}

uint64_t size_of(int type) {
    const uint64_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type < 10 ? sizes[type] : 0;
}

Status add(uint64_t address, size_t count, int type, int peer, Handle* handle, void* stream, bool sends) {
    if (!handle || !handle->of || !address || size_of(type) == 0) return INVALID_ARGUMENT;
    Communicator& of = *handle->of;
    if (peer < 0 || peer >= (int)of.sockets.size() || peer == of.rank) return INVALID_ARGUMENT;
    group.push_back({handle->of, address, count * size_of(type), peer, sends, stream});
    return depth > 0 ? SUCCESS : submit_group();
}

sockaddr_un address_of(const UniqueId& id, int rank, socklen_t& bytes) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::string name = "pipec-nccl-" + std::to_string(rank) + "-";
    for (int i = 0; i < 16; i++) {
        char digits[3];
        snprintf(digits, sizeof digits, "%02x", (unsigned char)id.bytes[i]);
        name += digits;
    }
    // A name without a file.
    memcpy(address.sun_path + 1, name.data(), name.size());
    bytes = (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
}

bool exchange(int socket, const Greeting& own, Greeting& other) {
    return send(socket, &own, sizeof own, MSG_NOSIGNAL) == sizeof own &&
           recv(socket, &other, sizeof other, MSG_WAITALL) == sizeof other;
}

} // namespace

API Status ncclGetVersion(int* version) {
    if (!version) return INVALID_ARGUMENT;
    *version = 22703;
    return SUCCESS;
}

API const char* ncclGetErrorString(Status status) {
    switch (status) {
    case SUCCESS: return "no error";
    case UNHANDLED_CUDA_ERROR: return "unhandled cuda error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    }
    return "unknown result code";
}

API Status ncclGetUniqueId(UniqueId* id) {
    if (!id) return INVALID_ARGUMENT;
    FILE* random = fopen("/dev/urandom", "rb");
    if (!random) return SYSTEM_ERROR;
    bool is_read = fread(id->bytes, sizeof id->bytes, 1, random) == 1;
    fclose(random);
    return is_read ? SUCCESS : SYSTEM_ERROR;
}

API Status ncclCommInitRank(Handle** handle, int ranks, UniqueId id, int rank) {
    if (!handle || ranks < 1 || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    static std::atomic<uint64_t> calls{0};
    uint64_t call = ++calls;
    if (is_planned("kill", call)) raise(SIGKILL);
    while (is_planned("meet", call)) sleep(1);
    Greeting own = {rank, ranks, {}};
    if (!current_gpu(own.gpu)) return UNHANDLED_CUDA_ERROR;
    auto of = std::make_shared<Communicator>();
    of->rank = rank;
    of->sockets.assign((size_t)ranks, -1);
    socklen_t bytes = 0;
    sockaddr_un here = address_of(id, rank, bytes);
    int port = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (port < 0 || bind(port, (sockaddr*)&here, bytes) != 0 || listen(port, ranks) != 0) return SYSTEM_ERROR;
    Status status = SUCCESS;
    auto meet = [&](int socket) {
        Greeting other;
        if (!exchange(socket, own, other)) return status = SYSTEM_ERROR;
        if (other.ranks != ranks || other.rank < 0 || other.rank >= ranks) return status = INVALID_ARGUMENT;
        of->sockets[(size_t)other.rank] = socket;
        if (memcmp(other.gpu, own.gpu, sizeof own.gpu) == 0) status = INVALID_USAGE;
        return status;
    };
    for (int other = rank + 1; other < ranks; other++) {
        sockaddr_un there = address_of(id, other, bytes);
        int line = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        int waited = 0;
        while (connect(line, (sockaddr*)&there, bytes) != 0 && waited++ < PATIENCE) usleep(1000);
        if (waited > PATIENCE) return SYSTEM_ERROR;
        meet(line);
    }
    for (int other = 0; other < rank; other++) meet(accept(port, nullptr, nullptr));
    close(port);
    if (status == SUCCESS) *handle = new Handle{of};
    return status;
}

API Status ncclSend(uint64_t from, size_t count, int type, int peer, Handle* handle, void* stream) {
    return add(from, count, type, peer, handle, stream, true);
}

API Status ncclRecv(uint64_t to, size_t count, int type, int peer, Handle* handle, void* stream) {
    return add(to, count, type, peer, handle, stream, false);
}

API Status ncclGroupStart() {
    depth++;
    return SUCCESS;
}

API Status ncclGroupEnd() {
    if (depth == 0) return INVALID_USAGE;
    return --depth > 0 ? SUCCESS : submit_group();
}

API Status ncclCommGetAsyncError(Handle* handle, Status* status) {
    if (!handle || !status) return INVALID_ARGUMENT;
    *status = SUCCESS;
    return SUCCESS;
}

API Status ncclCommAbort(Handle* handle) {
    if (!handle) return INVALID_ARGUMENT;
    handle->of->is_aborted = true;
    for (int socket : handle->of->sockets) {
        if (socket >= 0) shutdown(socket, SHUT_RDWR);
    }
    delete handle;
    return SUCCESS;
}

// Waits for the transfers that are queued.
API Status ncclCommDestroy(Handle* handle) {
    if (!handle) return INVALID_ARGUMENT;
    while (handle->of->queued > 0 && !handle->of->is_aborted) usleep(1000);
    delete handle;
    return SUCCESS;
}
