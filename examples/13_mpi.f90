! 13_mpi.f90 - data-parallel training in Fortran over MPI: a line through points that lie in many processes.
!
! Shows:  the Fortran module (extras/mlfab.f90) in a program that uses MPI itself: workers push gradients to a model,
!         and agree on an error by an allreduce. The model is y = a x + b; each worker has points of its own.
! Run:    make mpi && mpirun -n 4 build/mpi/openmpi/13_mpi
!
! MPI is initialised at MPI_THREAD_FUNNELED, so mlfab moves data inside its calls only.
!
! SPDX-License-Identifier: MIT
program fortran_mpi
  use mpi
  use mlfab
  implicit none
  integer, parameter :: points = 1000, steps = 200
  type(mlfab_config) :: config
  type(mlfab_context) :: ctx
  type(mlfab_error) :: error
  integer :: status, level, ierr, rank, workers, step, i
  real(4) :: model(2), gradient(2), x(points), y(points), miss
  real(8) :: total(1)

  call MPI_Init_thread(MPI_THREAD_FUNNELED, level, ierr)
  call mlfab_config_init(config)
  call mlfab_set(config, 'transport', 'mpi', status, error)
  if (status == 0) call mlfab_open(config, ctx, status, error)
  if (status /= 0) then
    print '(3a)', mlfab_name(status), ': ', error%text
    call MPI_Abort(MPI_COMM_WORLD, 1, ierr)
  end if
  call mlfab_rank(ctx, rank, workers)

  ! The points of this worker: y = 3 x + 1.
  do i = 1, points
    x(i) = real(mod(i * 37 + rank * 11, 200)) / 100.0 - 1.0
    y(i) = 3.0 * x(i) + 1.0
  end do

  model = 0.0
  call mlfab_tensor_add(ctx, 0, mlfab_f32, size(model, kind=8), status)
  call check('tensor_add')
  call mlfab_model_start(ctx, model, status)
  call check('model_start')
  do step = 1, steps
    gradient = 0.0
    do i = 1, points
      miss = model(1) * x(i) + model(2) - y(i)
      gradient = gradient - 0.5 / real(workers * points) * miss * [x(i), 1.0]
    end do
    call mlfab_push(ctx, gradient, status)
    call check('push')
    call mlfab_pull(ctx, model, status)
    call check('pull')
  end do
  call mlfab_barrier(ctx, status)
  call check('barrier')
  call mlfab_pull(ctx, model, status)
  call check('pull')

  total = sum((model(1) * x + model(2) - y)**2)
  call mlfab_allreduce(ctx, total, status)
  call check('allreduce')
  if (rank == 0) print '(a, i0, a, f6.3, a, f6.3, a, es9.2)', 'workers ', workers, ': y = ', model(1), ' x + ', model(2), &
    ', mean square error ', total(1) / (workers * points)
  call mlfab_close(ctx, status)
  call MPI_Finalize(ierr)
  if (abs(model(1) - 3.0) > 0.01 .or. abs(model(2) - 1.0) > 0.01) error stop 1

contains

  subroutine check(what)
    character(len=*), intent(in) :: what
    if (status == 0) return
    error = mlfab_last_error(ctx)
    print '(5a)', what, ': ', mlfab_name(status), ': ', error%text
    call MPI_Abort(MPI_COMM_WORLD, 1, ierr)
  end subroutine

end program
